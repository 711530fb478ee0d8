"""What forked processes tell each other arrives whole, in order, and nobody waits for the dead."""

import multiprocessing
import random
import time

import pytest
import torch

from fl_lightning.core.errors import ProcessFailure
from fl_lightning.federation.processes.shared_memory import ROOM, Neighbours

FORK = multiprocessing.get_context("fork")


def in_processes(size, act):
    """Return what an action gives in each of so many processes; None where it was ended."""
    neighbours, answers = Neighbours(size), FORK.SimpleQueue()

    def run(rank):
        torch.set_num_threads(1)
        neighbours.join(rank)
        try:
            answers.put((rank, act(neighbours, rank)))
        except ProcessFailure as failure:
            answers.put((rank, str(failure)))

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    neighbours.leave()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode is not None
    found = {}
    while not answers.empty():
        rank, answer = answers.get()
        found[rank] = answer
    return [found.get(rank) for rank in range(size)]


def said(rank, length):
    """Return bytes that tell who says how many of them."""
    return bytes((rank + i) % 251 for i in range(256)) * (length // 256 + 1)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_everybody_hears_everything(size):
    lengths = [0, 1, 1000, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM + 7]

    def talk(neighbours, rank):
        talker = random.Random(rank)
        for turn in range(40):
            time.sleep(talker.choice([0, 0, 0.001, 0.02]))  # it goes to sleep, too
            of = [lengths[(turn * (other + 1)) % len(lengths)] for other in range(size)]
            told = neighbours.gather(said(rank, of[rank])[: of[rank]])
            if told != [said(other, n)[:n] for other, n in enumerate(of)]:
                return turn
        return "all heard"

    assert in_processes(size, talk) == ["all heard"] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_sums_are_those_in_order_of_rank(size, dtype):
    shapes = [(), (0,), (7,), (3, 5), (ROOM // dtype.itemsize + 1,), (1001, 300)]

    def own(rank, shape):
        return (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 100).to(dtype)

    def add_up(neighbours, rank):
        for shape in shapes:
            total, expected = own(rank, shape), own(0, shape)
            neighbours.all_reduce(total)
            for other in range(1, size):
                expected += own(other, shape)
            if not torch.equal(total, expected):
                return shape
        return "equal"

    assert in_processes(size, add_up) == ["equal"] * size


@pytest.mark.parametrize("source", [0, 1, 2])
def test_one_tells_the_others(source):
    def tell(neighbours, rank):
        tensor = torch.full((ROOM, 3), rank, dtype=torch.uint8)
        neighbours.broadcast(tensor, source)
        return tensor.unique().tolist()

    assert in_processes(3, tell) == [[source]] * 3


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 3])
def test_nobody_waits_for_a_process_that_has_ended(gone, after):
    def meet(neighbours, rank):
        for turn in range(10):
            if rank == gone and turn == after:
                multiprocessing.current_process().kill()
            neighbours.gather(b"here")
        return "met ten times"

    began = time.monotonic()
    for rank, answer in enumerate(in_processes(3, meet)):
        assert (answer is None) if rank == gone else "another process of this run" in answer
    assert time.monotonic() - began < 20
