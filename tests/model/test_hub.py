"""Models by name: without a Hub, at once and plainly."""

from __future__ import annotations

import http.server
import threading

import pytest
from huggingface_hub import constants

from hf_slospec import InvalidInputError, SLOSpecGenerator
from hf_slospec.model.loading import hub_options, loading_hint


@pytest.fixture
def no_hub(monkeypatch):
    """Nothing listens at the address of the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def downloaded(folder):
    """A cache in which org/here was downloaded to."""
    repository = folder / "models--org--here"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", r"there is no folder \./nowhere"),
        ("/no/where", "there is no folder /no/where"),
        ("a/b/c", "neither a folder nor a repository; their names are as org/name"),
        (
            "org/name",
            "not downloaded|was downloaded before, and http://127.0.0.1:9 cannot be reached",
        ),
        ("9" * 5000, "neither a folder nor a repository"),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_what_is_missing_is_said_without_a_request_by_transformers(name, message, monkeypatch):
    monkeypatch.setattr("hf_slospec.batcher.generator.AutoTokenizer", None)
    with pytest.raises(InvalidInputError, match=message):
        SLOSpecGenerator.from_pretrained(name)


@pytest.mark.usefixtures("no_hub")
def test_downloaded_models_need_no_hub(tmp_path):
    assert hub_options("org/here", downloaded(tmp_path)) == {"local_files_only": True}
    assert hub_options(str(tmp_path)) == {}


def test_offline_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInputError, match="HF_HUB_OFFLINE is set"):
        hub_options("org/name", tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(InvalidInputError, match=r"model\.gguf is a file; give the folder"):
        hub_options(tmp_path / "model.gguf")


def test_a_hub_that_answers_is_left_to_transformers(tmp_path, monkeypatch):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        assert hub_options("org/name", tmp_path) == {}
        hub.shutdown()


def test_hints_name_what_can_be_done():
    remote = ValueError(
        "Please pass the argument `trust_remote_code=True` to allow custom code to be run."
    )
    assert "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)" in loading_hint(
        remote
    )
    pickled = OSError("no file named model.safetensors found in directory x.")
    assert loading_hint(pickled) == str(pickled)
    assert loading_hint(pickled, allows_pickle=False).endswith("need --allow-pickle")
