"""Files beside checkpoints: there as long as a checkpoint needs them."""

import torch

from fl_lightning.client.vector_file import VectorFile
from fl_lightning.federation.checkpoints.atomic_checkpoint import AtomicCheckpointIO
from fl_lightning.federation.checkpoints.memory_files import FOLDER, WorkingFolder


def test_files_stay_as_long_as_a_checkpoint_needs_them(tmp_path):
    io, beside = AtomicCheckpointIO(), tmp_path / "checkpoints" / FOLDER
    vectors = [VectorFile.write(torch.full((3,), float(i)), tmp_path / "work") for i in range(4)]

    def save(name, *numbers):
        io.files = lambda: [vectors[i] for i in numbers]
        io.save_checkpoint({}, tmp_path / "checkpoints" / name)

    def there():
        return {i for i, file in enumerate(vectors) if (beside / file.path.name).exists()}

    save("last.ckpt", 0, 1)
    save("best.ckpt", 0, 1)
    assert there() == {0, 1}
    save("last.ckpt", 1, 2)
    assert there() == {0, 1, 2}
    io.remove_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    assert there() == {1, 2}
    save("last.ckpt", 3)
    assert there() == {3}
    (tmp_path / "checkpoints" / "last.ckpt").unlink()  # by hand
    save("other.ckpt", 0)
    assert there() == {0}
    assert VectorFile(beside / vectors[0].path.name, "float32", 3).read().tolist() == [0, 0, 0]


def test_a_run_without_such_files_leaves_no_folder(tmp_path):
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_killed_runs_folder_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path):
    first = WorkingFolder(tmp_path)
    mine = first()
    host, _, _ = mine.name.rsplit("-", 2)
    left = mine.with_name(f"{host}-4194399-killed")  # above the largest process id
    left.mkdir()
    second = WorkingFolder(tmp_path)
    assert second() != mine
    assert mine.is_dir()
    assert not left.exists()
    del first, second
    assert not list(tmp_path.iterdir())
