"""Version facts.

Properties:
- vLLM below 0.26 is refused, with what would go wrong; supported releases pass;
- facts switch at the release they name;
- newer than what was read is noticed, not refused;
- a call that a dead engine never answers ends with the engine's error.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from packaging.version import Version

from vllm_parity_plugin import compat
from vllm_parity_plugin.errors import ParityError


@pytest.mark.parametrize("found", ["0.18.1", "0.22.1", "0.25.9"])
def test_old_versions_are_refused(found: str) -> None:
    """H3: before 0.26 an fp32 head is accepted and ignored, so there is nothing to protect."""
    with pytest.raises(ParityError) as caught:
        compat.check_vllm_version(Version(found))
    message = str(caught.value)
    assert message.startswith(f"vLLM {found} is installed")
    assert "fp32 lm_head" in message and "pip install 'vllm>=0.26.0,<0.33'" in message


@pytest.mark.parametrize("found", ["0.26.0", "0.31.0", "0.33.0", "1.0"])
def test_supported_versions_pass(found: str) -> None:
    compat.check_vllm_version(Version(found))
    assert compat.untested_vllm(Version(found)) == (found in {"0.33.0", "1.0"})


def test_facts_switch_at_their_release() -> None:
    assert not compat.has_weight_version(Version("0.26.0"))
    assert compat.has_weight_version(Version("0.27.0"))
    assert compat.has_cascade_attention(Version("0.31.0"))
    assert not compat.has_cascade_attention(Version("0.32.0"))


def test_the_installed_version_has_no_build_tag() -> None:
    assert compat.vllm_version().local is None
    compat.check_vllm_version()


def test_a_call_to_a_dead_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer comes through as long as the engine lives; a dead one's error ends the wait."""
    monkeypatch.setattr(compat, "DEATH_SECONDS", 0.01)
    engine = SimpleNamespace(errored=False, dead_error=RuntimeError("the engine is dead"))

    async def answer() -> int:
        await asyncio.sleep(0.05)
        return 7

    async def never() -> None:
        asyncio.get_running_loop().call_later(0.05, setattr, engine, "errored", True)
        await asyncio.Event().wait()

    assert asyncio.run(compat.unless_dead(engine, answer())) == 7
    with pytest.raises(RuntimeError, match="the engine is dead"):
        asyncio.run(compat.unless_dead(engine, never()))
