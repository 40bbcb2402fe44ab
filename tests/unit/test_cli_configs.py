"""Settings become the services' configurations, and the defaults are the same on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load
from common.engine.settings import EngineSettings
from common.errors import ConfigError
from common.transfer.faults import FaultPlan
from services.cli.configs import decode_config, prefill_config, router_config
from services.cli.main import COMMANDS
from services.cli.sections import DecodeSection, EngineSection, RouterSection
from services.cli.settings import AllSettings
from services.decode.config import DecodeConfig
from services.prefill.config import HandoffConfig, PrefillConfig
from services.router.config import RouterConfig


def test_default_settings_are_the_services_own_defaults(shipped_checkpoint: Path) -> None:
    settings = AllSettings()
    engine = EngineSettings(checkpoint_dir=shipped_checkpoint)
    assert prefill_config(settings) == PrefillConfig(model="dspark-tiny", engine=engine)
    assert decode_config(settings) == DecodeConfig(model="dspark-tiny", engine=engine)
    assert router_config(settings) == RouterConfig(
        checkpoint_dir=shipped_checkpoint,
        model="dspark-tiny",
        prefill_addresses=("127.0.0.1:50052",),
        decode_addresses=("127.0.0.1:50053",),
        drain_timeout_s=settings.shutdown_s,
    )


def test_what_is_set_arrives() -> None:
    settings = AllSettings(
        shutdown_s=7.0,
        engine=EngineSection(dtype="bfloat16", draft_length=3, speculate=False),
        decode=DecodeSection(num_slots=5, num_pages=9, max_step_rows=64, computes_prompts=True),
        router=RouterSection(max_queued=2, queue_timeout_s=1.5),
    )
    decode = decode_config(settings)
    assert (decode.computes_prompts, decode.drain_s) == (True, 7.0)
    assert (decode.engine.num_slots, decode.engine.num_pages) == (5, 9)
    assert (decode.engine.dtype, decode.engine.draft_length) == ("bfloat16", 3)
    assert not decode.engine.speculate
    queue = router_config(settings).queue
    assert (queue.max_queued, queue.queue_timeout_s) == (2, 1.5)


@pytest.mark.parametrize("command", ["up", "prefill"])
def test_how_long_a_lost_write_and_a_lease_are_waited_for_reaches_the_prefill_worker(
    command: str,
) -> None:
    values = {"transfer-timeout-s": "2.5", "min-transfer-mb-per-s": "4", "lease-s": "7"}
    arguments = [part for name, value in values.items() for part in (f"--prefill.{name}", value)]
    arguments.append("--no-prefill.sends-drafter-state")
    settings = load(AllSettings, arguments, program="x", flat=COMMANDS[command].flat)
    handoff = prefill_config(settings).handoff
    assert (handoff.transfer_timeout_s, handoff.lease_s) == (2.5, 7.0)
    assert not handoff.sends_drafter_state
    assert handoff.write_timeout_s(10_000_000) == 2.5 + 2.5


def test_a_lost_chunk_is_given_up_soon_and_a_million_tokens_are_not_given_up_while_they_travel() -> (
    None
):
    handoff = HandoffConfig()
    assert handoff.write_timeout_s(12_000_000) < 12  # 512 tokens of DeepSeek-V4-Flash
    gigabit_s = 7e9 / 1.1e8  # its 2^20 tokens from a lease, over 1 Gbit/s
    assert handoff.write_timeout_s(7_000_000_000) > 2 * gigabit_s


def test_handoff_config_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="negotiate_timeout_s is 0"):
        HandoffConfig(negotiate_timeout_s=0)


@pytest.mark.parametrize("command", ["up", "prefill"])
def test_faults_for_a_drill_reach_the_prefill_worker(command: str) -> None:
    settings = load(
        AllSettings, ["--faults", "corrupt:3,stall:5"], program="x", flat=COMMANDS[command].flat
    )
    assert prefill_config(settings).faults == FaultPlan.parse("corrupt:3,stall:5")


def test_faults_that_cannot_be_obeyed_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="'explode' is not one of fail, delay"):
        load(AllSettings, ["--prefill.faults", "explode:3"], program="x")


def test_names_of_another_system_are_shown_by_every_role_or_by_none() -> None:
    settings = load(AllSettings, ["--metrics-compat", "vllm"], program="x")
    for config in (router_config, prefill_config, decode_config):
        assert config(settings).metrics_compat == "vllm"
        assert config(AllSettings()).metrics_compat == "none"
