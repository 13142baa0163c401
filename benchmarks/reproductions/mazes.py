"""Mazes after arXiv 2602.02710: data, and an untrained Qwen2 model of 3.9 million parameters.

A maze is a tree over SIDE x SIDE rooms, grown by Prim's algorithm; with its walls it has 2 * SIDE + 1 cells a side. A
prompt has two tokens per room, its name and a hexadecimal digit whose bits are its open sides, then start and goal. The
answer is the only path between them, one token per room entered. Two by two rooms with a wall between the lower ones,
from the lower left to the lower right:

    A6BcC1D1CD:    ->  ABD

Mazes of four by four rooms have prompts of 35 tokens: the samples of a group share the first 32, a whole block of the
engine's cache.
"""

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

Room = tuple[int, int]  # row and column, from the upper left
Maze = dict[Room, set[str]]  # the open sides of each room

MOVES = {"U": (-1, 0), "R": (0, 1), "D": (1, 0), "L": (0, -1)}
BITS = {"U": 1, "R": 2, "D": 4, "L": 8}
BACK = {"U": "D", "R": "L", "D": "U", "L": "R"}
NAMES = "ABCDEFGHIJKLMNOP"
CHARACTERS = "123456789abcdef" + NAMES + ":"
SIDE, SHORTEST = 4, 4  # rooms of a side, rooms entered on a path


def step(room: Room, move: str) -> Room:
    return room[0] + MOVES[move][0], room[1] + MOVES[move][1]


def grow(rng: random.Random, side: int = SIDE) -> Maze:
    """A random maze: Prim's algorithm, which opens a random wall between the tree and a room outside it."""
    maze: Maze = {(row, column): set() for row in range(side) for column in range(side)}
    inside = {rng.choice(sorted(maze))}
    walls = [(room, move) for room in inside for move in MOVES]
    while len(inside) < len(maze):
        room, move = walls.pop(rng.randrange(len(walls)))
        other = step(room, move)
        if other in maze and other not in inside:
            maze[room].add(move)
            maze[other].add(BACK[move])
            inside.add(other)
            walls += [(other, further) for further in MOVES]
    return maze


def path(maze: Maze, start: Room, goal: Room) -> list[Room]:
    """The rooms entered on the only path from ``start`` to ``goal``."""
    ways: dict[Room, list[Room]] = {start: []}
    queue = deque([start])
    while goal not in ways:
        room = queue.popleft()
        for other in (step(room, move) for move in sorted(maze[room])):
            if other not in ways:
                ways[other] = [*ways[room], other]
                queue.append(other)
    return ways[goal]


def text(maze: Maze, start: Room, goal: Room) -> tuple[str, str]:
    """The maze and its ends as the model reads them, and the path as it should answer."""
    names = dict(zip(sorted(maze), NAMES, strict=False))
    rooms = "".join(f"{name}{sum(BITS[move] for move in maze[room]):x}" for room, name in names.items())
    answer = "".join(names[room] for room in path(maze, start, goal))
    return f"{rooms}{names[start]}{names[goal]}:", answer


def rows(rng: random.Random, total: int, taken: set[str]) -> Iterator[dict[str, str]]:
    """``total`` rows whose prompts are not in ``taken``; adds them to it."""
    while total:
        maze = grow(rng)
        start, goal = rng.sample(sorted(maze), 2)
        asked, answer = text(maze, start, goal)
        if len(answer) >= SHORTEST and asked not in taken:
            taken.add(asked)
            total -= 1
            yield {"prompt": asked, "answer": answer}


def make(folder: Path, *, supervised: int, train: int, heldout: int, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``heldout.jsonl``, which share no prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for name, total in (("heldout", heldout), ("train", train), ("sft", supervised)):
        lines = (json.dumps(row) + "\n" for row in rows(random.Random(f"{seed} {name}"), total, taken))
        (folder / f"{name}.jsonl").write_text("".join(lines))


def make_model(folder: Path) -> None:
    """Write an untrained Qwen2 model with four layers of width 256, and a tokenizer with a token per character."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.countdown.make_model import tokenizer_of

    tokenizer = tokenizer_of(CHARACTERS, ".")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--supervised", type=int, default=38_400)
    parser.add_argument("--train", type=int, default=800)
    parser.add_argument("--heldout", type=int, default=100)
    args = parser.parse_args()
    make(args.folder, supervised=args.supervised, train=args.train, heldout=args.heldout)
    make_model(args.folder / "untrained")


if __name__ == "__main__":
    main()
