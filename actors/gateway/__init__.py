"""An OpenAI-compatible server in every actor's process: it records what a program that calls it makes the model do.

messages      one form for equal chat messages, and where two histories first differ
json_values   JSON of bounded depth, whose text can be encoded
token_lengths how many characters a token can stand for: what cannot fit is not tokenised
rendering     messages to token ids: a whole prompt, or only what is new behind recorded ids
session       the record of an episode: its calls, which history continues which, and when it ends
asked         what a request asks for, and what it may not ask, because sampling is the job's
replies       sampled ids to text, tool calls and reasoning, by vLLM's parsers
calls         one call: plan, sample, record
generate      vLLM's route for token ids, read as one for a prompt
answers       the bodies of OpenAI's API, and of vLLM's route for token ids
aside         work that grows with a request, in threads
bodies        the size, arrival and parsing of requests
http          routes, keys and errors
server        the listening socket, on the event loop of the engine
served        gateway and server of one actor
groups        n sessions to the `Group` that the learner takes
standalone    the gateway of a finished model: no sessions, and sampling as each request wants it
"""
