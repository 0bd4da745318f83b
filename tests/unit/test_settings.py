"""Settings.

Properties:
- ``--additional-config`` wins over the environment, which wins over the defaults;
- an unknown name, a bad value and a wrong type are errors that name what is known;
- every setting has a description, and its documented default is the real one;
- mode off installs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_parity_plugin import install as install_module
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.settings import ParitySettings, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ParitySettings.model_fields:
        monkeypatch.delenv(f"VLLM_PARITY_{name.upper()}", raising=False)


def test_defaults() -> None:
    """No setting at all: enforce, no token, a private directory, K = 128."""
    settings = load_settings()
    assert (settings.mode, settings.token, settings.weights_dir) == ("enforce", None, None)
    assert settings.head_size == 128


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """additional_config > environment > default, name by name."""
    monkeypatch.setenv("VLLM_PARITY_MODE", "observe")
    monkeypatch.setenv("VLLM_PARITY_HEAD_SIZE", "7")
    monkeypatch.setenv("VLLM_PARITY_WEIGHTS_DIR", "/somewhere")
    settings = load_settings({"parity": {"mode": "strict"}, "other plugin": 1})
    assert (settings.mode, settings.head_size) == ("strict", 7)
    assert settings.weights_dir == Path("/somewhere")


def test_the_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in the environment appears in no representation of the settings."""
    monkeypatch.setenv("VLLM_PARITY_TOKEN", "very-secret")
    settings = load_settings()
    assert settings.token is not None and settings.token.get_secret_value() == "very-secret"
    assert "very-secret" not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize(
    "config",
    [
        {"modus": "strict"},
        {"mode": "strickt"},
        {"head_size": 0},
        {"head_size": "many"},
        "strict",
        ["mode"],
    ],
)
def test_what_is_not_understood_is_an_error(config: Any) -> None:
    """A misspelt key or a bad value is refused, and the message says what is known."""
    with pytest.raises(ParityError) as caught:
        load_settings({"parity": config})
    known = "mode" if isinstance(config, dict) else "write --additional-config"
    assert known in caught.value.fix


def test_unknown_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is refused, and the message lists the real ones."""
    monkeypatch.setenv("VLLM_PARITY_MODUS", "strict")
    with pytest.raises(ParityError, match="VLLM_PARITY_MODUS") as caught:
        load_settings()
    for name in ParitySettings.model_fields:
        assert f"VLLM_PARITY_{name.upper()}" in caught.value.fix


@pytest.mark.parametrize("name", ParitySettings.model_fields)
def test_every_setting_is_described(name: str) -> None:
    """The string under the field is the documentation."""
    description = ParitySettings.model_fields[name].description
    assert description and description.endswith(".")


def test_mode_off_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode off: no patch is applied, not even looked for."""

    class Untouchable:
        def apply(self) -> bool:
            raise AssertionError("a patch was applied")

    monkeypatch.setattr(install_module, "PATCHES", (Untouchable(),))
    monkeypatch.setenv("VLLM_PARITY_MODE", "off")
    assert install_module.install() == []
    monkeypatch.setenv("VLLM_PARITY_MODE", "enforce")
    with pytest.raises(AssertionError, match="a patch was applied"):
        install_module.install()
