"""What may be believed of caches and temporary folders, and that each reader of them asks."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec
import pytest

from headrace.executor import library_caches
from headrace.executor.checkpoints import demo_model
from headrace.executor.checkpoints.tokenizers import converted_tokenizers
from headrace.frontend.text import tokenizer_cache
from headrace.ipc.messages import TokenizerBundle, TokenizerInfo
from headrace.ipc.process import own_folder, runtime_directory, trusted_files
from headrace.ipc.process.own_folder import OwnFolder, private_folder
from headrace.ipc.process.trusted_files import (
    UntrustedFileError,
    read_trusted,
    trusted_folder,
    why_untrusted,
    why_untrusted_tree,
)
from headrace.kernels.cpu.runtime import threads

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file two folders deep, which may be believed."""
    folder = trusted_folder(tmp_path / "above" / "folder")
    (folder / "file").write_text("content")
    (folder / "file").chmod(0o644)
    return folder / "file"


def test_what_only_this_user_can_have_written_is_read(file: Path) -> None:
    assert read_trusted(file) == b"content"
    assert why_untrusted(file) == why_untrusted_tree(file.parent) == why_untrusted(file.parent / "missing") == ""


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o622, 0o777])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_others_can_write_is_not(file: Path, mode: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda gid: False)
    changed = [file, *file.parents][depth]
    changed.chmod(mode | (0o111 if depth else 0))
    with pytest.raises(UntrustedFileError, match=rf"^{changed} can be written by other users \(mode 0\d+\)"):
        read_trusted(file)


def test_a_users_private_group_is_nobody_else(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.chmod(0o775)
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda gid: gid == file.stat().st_gid)
    assert read_trusted(file) == b"content"


@needs_root
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_belongs_to_another_user_is_not(file: Path, depth: int) -> None:
    changed = [file, *file.parents][depth]
    os.chown(changed, OTHER, -1)
    with pytest.raises(UntrustedFileError, match=rf"^{changed} belongs to user {OTHER}"):
        read_trusted(file)


def test_a_sticky_folder_is_passed_and_is_no_folder_of_ones_own(file: Path) -> None:
    file.parents[1].chmod(0o1777)
    assert read_trusted(file) == b"content"
    with pytest.raises(UntrustedFileError, match="can be written by other users"):
        trusted_folder(file.parents[1])


@needs_root
def test_another_users_entry_in_a_sticky_folder_is_not_believed(file: Path) -> None:
    file.parents[1].chmod(0o1777)
    os.lchown(file.parent, OTHER, -1)
    with pytest.raises(UntrustedFileError, match=f"belongs to user {OTHER}"):
        read_trusted(file)


def test_links_are_followed_and_judged_by_where_they_are_and_lead(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "chain").symlink_to("above/../link")
    assert read_trusted(tmp_path / "link") == read_trusted(tmp_path / "chain") == b"content"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(file)
    (tmp_path / "through").symlink_to(tmp_path / "open" / "link")
    for each in ("open/link", "through"):
        with pytest.raises(UntrustedFileError, match=f"^{tmp_path / 'open'} can be written"):
            read_trusted(tmp_path / each)
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(OSError, match="more than 40 links"):
        read_trusted(tmp_path / "round")


@needs_root
def test_another_users_link_is_not_followed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    os.lchown(tmp_path / "link", OTHER, -1)
    with pytest.raises(UntrustedFileError, match=f"link belongs to user {OTHER}"):
        read_trusted(tmp_path / "link")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UntrustedFileError, match="is neither a file nor a folder"):
        read_trusted(tmp_path / "pipe")


def test_something_deep_in_a_folder_opens_it(file: Path) -> None:
    file.chmod(0o666)
    assert why_untrusted_tree(file.parents[1]).startswith(f"{file} can be written")
    file.chmod(0o644)
    (file.parent / "link").symlink_to("/dev/null")
    assert "/dev/null" in why_untrusted_tree(file.parents[1])


def test_folders_are_made_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = trusted_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) & 0o022 for each in (made, made.parent)] == [0, 0]


def bundle() -> TokenizerBundle:
    return TokenizerBundle(tokenizer_json=b"{}")


def test_a_converted_tokenizer_that_others_can_have_written_is_made_anew(
    private_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    def make() -> TokenizerBundle:
        made.append(1)
        return bundle()

    for _ in range(2):
        converted_tokenizers.cached_bundle("model", make)
    assert len(made) == 1
    (kept,) = (private_cache / "converted-tokenizers").iterdir()
    kept.chmod(0o666)
    converted_tokenizers.cached_bundle("model", make)
    assert len(made) == 2
    assert f"{kept} can be written by other users" in caplog.text
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600, "it is kept again"
    kept.parent.chmod(0o777)
    converted_tokenizers.cached_bundle("model", make)
    assert len(made) == 3


def test_a_fetched_tokenizer_is_not_taken_from_an_open_folder(private_cache: Path) -> None:
    data = msgspec.msgpack.encode(bundle())
    info = TokenizerInfo(content_hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    tokenizer_cache.store_bundle(info, bundle())
    assert tokenizer_cache.load_bundle(info) == bundle()
    (private_cache / "tokenizers").chmod(0o777)
    assert tokenizer_cache.load_bundle(info) is None


def test_a_demo_model_of_others_is_not_taken(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "SIZE_BYTES", 4)
    trusted_folder(private_cache)
    demo_model.demo_model_path().write_bytes(b"GGUF")
    assert demo_model.is_present()
    demo_model.demo_model_path().chmod(0o666)
    assert not demo_model.is_present()


def test_locks_of_cores_in_a_folder_of_others_are_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "locks"
    held = threads.claim_cpus([0], folder)
    assert held is not None
    for each in held:
        os.close(each)
    folder.chmod(0o777)
    assert threads.claim_cpus([0], folder) is None
    assert "are not pinned to cores" in caplog.text


VARIABLES = {
    "TRITON_CACHE_DIR": ".triton/cache",
    "TORCH_EXTENSIONS_DIR": ".cache/torch_extensions",
    "PYTORCH_KERNEL_CACHE_PATH": ".cache/torch/kernels",
    "CUDA_CACHE_PATH": ".nv/ComputeCache",
    "HF_MODULES_CACHE": ".cache/huggingface/modules",
    "TORCHINDUCTOR_CACHE_DIR": ".cache/headrace/torchinductor",
}


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("is_named", [False, True])
def test_caches_from_which_libraries_run_code_are_this_users_or_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, is_named: bool
) -> None:
    for name in (*VARIABLES, "HF_HOME", "XDG_CACHE_HOME", "TRITON_HOME", "HEADRACE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in VARIABLES:
        monkeypatch.setitem(os.environ, name, "")  # restored afterwards, unlike what is only deleted
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = trusted_folder(tmp_path / ("named" if is_named else VARIABLES[variable]))
    if is_named:
        monkeypatch.setenv(variable, str(cache))
    (cache / "kernel.so").write_text("")
    library_caches.trust_library_caches()
    assert os.environ[variable] in ("", str(cache))
    (cache / "kernel.so").chmod(0o666)
    private_folder.cache_clear()
    library_caches.trust_library_caches()
    assert os.environ[variable] not in ("", str(cache))
    assert why_untrusted_tree(os.environ[variable]) == ""
    assert f"{variable} is a folder of this process alone" in caplog.text
    others = [os.environ[name] for name in VARIABLES if name != variable]
    assert all(str(tmp_path) in each or not each for each in others), "the others stay as they are"


def test_temporary_folders_in_which_others_cannot_replace_ours_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "open"))
    monkeypatch.setattr(own_folder, "SYSTEMS_FOLDERS", (str(tmp_path / "sticky"),))
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    for name, mode in (("open", 0o777), ("sticky", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    with OwnFolder("test") as folder:
        assert folder.path.parent == tmp_path / "sticky"
    (tmp_path / "sticky").chmod(0o777)
    with OwnFolder("test") as folder:
        assert folder.path.parent == tmp_path / "open", "where there is none, the one that is named"


def test_sockets_and_records_are_where_others_cannot_replace_the_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with OwnFolder("t") as folder:
        for name, mode in (("open", 0o777), ("sticky", 0o1777)):
            (folder.path / name).mkdir()
            (folder.path / name).chmod(mode)
        monkeypatch.delenv("HEADRACE_RUNTIME_DIR", raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.path / "open"))
        monkeypatch.setenv("TMPDIR", str(folder.path / "sticky"))
        assert runtime_directory.runtime_directory().parent == folder.path / "sticky"
        assert not caplog.text
        named = folder.path / "open" / "named"
        monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(named))
        assert runtime_directory.runtime_directory() == named
        assert f"Other users can put their own in the place of {named}" in caplog.text
