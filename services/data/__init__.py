"""Data: turns files and data sets into prompts, and decides the order in which a run uses them.

readers       rows of a file or folder            hub           rows of a Hugging Face data set
mapping       fields, filters, tags               render        templates and chat templates
prompts       prompts of a DataSpec               mixture       the order of prompts: shuffles, mixtures, curricula
recipes       published layouts                   decontaminate overlap of a training set with an evaluation set
report        dropped rows and the reasons        check         what ``volley data check`` prints
tokens        tokenizers and token ids            files         writes prompts and reports
generated     tasks that reasoning-gym makes      generate      the process that makes them
"""
