"""What happens without TRL, and with a TRL whose trainer was not read.

Properties: one paragraph with the fix, and no import of TRL before the check; the pure loss needs
no TRL at all.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from trl_callbacks import compat
from vllm_parity_plugin.errors import ParityError


def test_without_trl_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin alone does not need TRL; the trainer's side says how to get it."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compat, "version", missing)
    with pytest.raises(ParityError, match=r"vllm-parity\[trl\]"):
        compat.check_trl_version()


@pytest.mark.parametrize("found", ["1.15.2", "1.17.0", "2.0.0"])
def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """GRPOTrainer's internals differ between releases."""
    monkeypatch.setattr(compat, "version", lambda name: found)
    with pytest.raises(ParityError, match=found):
        compat.check_trl_version()


def test_this_trl_is_accepted() -> None:
    """The pinned release."""
    compat.check_trl_version()


def test_the_loss_needs_no_trl() -> None:
    """``from trl_callbacks import score_centering_loss`` in an environment without frameworks."""
    code = (
        "import sys; sys.modules.update(trl=None, transformers=None, vllm=None, accelerate=None)\n"
        "from trl_callbacks import score_centering_loss; print(score_centering_loss.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "score_centering_loss", done.stderr


def test_a_callback_outside_a_trainer_is_refused() -> None:
    """It is a method of a trainer that calls, or nothing works."""
    with pytest.raises(ParityError, match="GRPOTrainer"):
        compat.calling_trainer()
