"""Host buffers on CPU; that CUDA's fill beside other work is for a machine with a GPU to show."""

import threading

import torch

from learner.staging import HostBuffer, Staging


def parts(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


def test_parts_are_copied_end_to_end() -> None:
    staging = Staging(torch.device("cpu"), capacity=100)
    pieces = parts(3, 0, 60)
    buffer = staging.copied(pieces)
    assert torch.equal(buffer.content, torch.cat(pieces))
    assert buffer.array.tobytes() == torch.cat(pieces).numpy().tobytes()
    pieces[0] += 1
    assert not torch.equal(buffer.content, torch.cat(pieces))


def test_memory_is_used_again_and_never_for_two_contents_at_a_time() -> None:
    staging = Staging(torch.device("cpu"), capacity=100)
    first, second, large = (staging.copied(parts(size)) for size in (40, 40, 500))
    assert len({each.memory.data_ptr() for each in (first, second, large)}) == 3
    assert (first.memory.numel(), large.memory.numel()) == (100, 500)
    for each in (large, first):
        staging.give_back(each)
    assert staging.copied(parts(100)).memory is first.memory, "the smallest that is large enough"
    assert staging.copied(parts(101)).memory is large.memory
    assert staging.copied(parts(1)).memory is not second.memory


def test_buffers_may_come_back_from_other_threads() -> None:
    staging = Staging(torch.device("cpu"), capacity=1 << 10)
    seen, lock = set[int](), threading.Lock()

    def check(buffer: HostBuffer, content: torch.Tensor) -> None:
        assert torch.equal(buffer.content, content)
        with lock:
            seen.add(buffer.memory.data_ptr())
        staging.give_back(buffer)

    threads = []
    for _ in range(200):
        (content,) = parts(1 << 10)
        threads.append(threading.Thread(target=check, args=(staging.copied([content]), content)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(seen) < 200


def test_on_cpu_nothing_is_marked_and_the_block_runs_as_it_is() -> None:
    staging = Staging(torch.device("cpu"), capacity=1)
    assert staging.mark() is None
    with staging.beside(None):
        assert staging.copied(parts(2)).content.numel() == 2
