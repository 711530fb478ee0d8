"""What clients remember: in RAM and on disk alike, and nothing before it counts."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import ConfigurationError
from fl_lightning.client import memory as client_memory
from fl_lightning.client.memory import SUFFIX, ClientMemory, VectorFile

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(-9, 9)),
        st.tuples(st.sampled_from(["commit", "discard", "reload", "relocate"])),
    ),
    max_size=20,
)


@settings(max_examples=40)
@given(actions=ACTIONS, limit=st.sampled_from([0, 20, 1000]), inside=st.booleans())
def test_it_is_a_dictionary_wherever_vectors_are(actions, limit, inside, tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_memory, "INSIDE_CHECKPOINT_BYTES", 0)
        memory = ClientMemory(limit, lambda: folder)
        present, new = {}, {}
        for action, *what in actions:
            if action == "put":
                client, number = what
                new[client] = torch.tensor([number, number + 1, 7.0])
                memory.put("m", client, new[client].clone())
            elif action == "commit":
                memory.commit()
                present |= new
                new = {}
            elif action == "discard":
                memory.discard()
                new = {}
            elif action == "relocate":  # one leaves, one comes
                memory.discard()
                new = {}
                memory.relocate("m", torch.tensor([1, -1, 0]))
                present = {
                    c: torch.stack([v[1], v.new_zeros(()), v[0]]) for c, v in present.items()
                }
            else:
                state = memory.state_dict(inside=inside)
                before, memory = memory, ClientMemory(limit, lambda: folder)
                memory.load_state_dict(state, folder)
                new = {}
                del before
        for client in range(4):
            found = memory.get("m", client)
            if client in present:
                assert torch.equal(found, present[client])
            else:
                assert found is None
        assert memory.waiting().keys() == {("m", client) for client in new}


def test_what_is_not_needed_any_more_is_deleted(tmp_path):
    memory = ClientMemory(0, lambda: tmp_path)

    def files():
        return len(list(tmp_path.glob(f"*{SUFFIX}")))

    for client in range(3):
        memory.put("m", client, torch.full((4,), float(client)))
    assert files() == 3
    memory.commit()
    memory.put("m", 0, torch.full((4,), 1.0))  # what client 1 has
    memory.commit()
    assert files() == 2
    memory.put("m", 2, torch.full((4,), 9.0))
    assert files() == 3
    memory.discard()
    assert files() == 2


def test_what_did_not_change_is_not_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(client_memory, "INSIDE_CHECKPOINT_BYTES", 0)
    memory = ClientMemory(1000, lambda: tmp_path)
    for client in range(2):
        memory.put("m", client, torch.full((4,), float(client)))
    memory.commit()
    memory.state_dict(inside=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    memory.put("m", 1, torch.ones(4) * 5)
    memory.commit()
    memory.state_dict(inside=False)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == len(after) == 2
    assert sum(after.get(path) == time for path, time in before.items()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_files_keep_every_bit_and_tell_damage(tmp_path, dtype):
    vector = torch.randn(10, generator=torch.Generator().manual_seed(0)).to(dtype)
    file = VectorFile.write(vector, tmp_path)
    file.check()
    assert torch.equal(file.read(), vector)
    assert file.num_bytes == vector.nbytes
    content = bytearray(file.path.read_bytes())
    content[3] ^= 1
    file.path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="was changed or damaged"):
        file.check()
    file.path.write_bytes(content[:-1])
    with pytest.raises(ConfigurationError, match="has another length"):
        file.check()


def test_what_waits_at_a_site_outlives_its_process():
    memory = ClientMemory()
    memory.put("control variate", 1, torch.ones(2))
    memory.commit()
    memory.put("control variate", 1, torch.full((2,), 3.0))
    again = ClientMemory()
    again.load_state_dict(memory.state_with_waiting())
    assert again.get("control variate", 1).tolist() == [1, 1]
    again.commit(1)
    assert again.get("control variate", 1).tolist() == [3, 3]


def test_adopted_files_outlive_their_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.client.memory.INSIDE_CHECKPOINT_BYTES", 0)
    memory = ClientMemory(ram_bytes=0, folder=lambda: tmp_path / "beside")
    memory.put("personal", 2, torch.ones(4))
    memory.commit()
    again = ClientMemory(ram_bytes=0, folder=lambda: tmp_path / "own")
    again.load_state_dict(memory.state_dict(inside=False), tmp_path / "beside", adopt=True)
    shutil.rmtree(tmp_path / "beside")
    assert again.get("personal", 2).tolist() == [1, 1, 1, 1]
