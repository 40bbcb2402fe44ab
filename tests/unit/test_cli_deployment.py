"""Which processes `dspark up` starts, and with which flags."""

from __future__ import annotations

from pydantic import SecretStr
from pydantic_settings import CliApp

from common.config import load
from services.cli.deployment import Plan, plans
from services.cli.main import COMMANDS
from services.cli.sections import (
    DecodeSection,
    EngineSection,
    PrefillSection,
    RouterSection,
    UpSection,
)
from services.cli.settings import AllSettings


def planned(**settings: object) -> list[Plan]:
    router = RouterSection(port=0)
    return plans(AllSettings.model_validate({"router": router, **settings}))


def test_workers_come_first_and_the_router_is_told_where_they_are() -> None:
    *workers, router = planned(up=UpSection(prefills=2, decodes=1))
    assert [plan.name for plan in workers] == ["prefill-0", "prefill-1", "decode-0"]
    ports = [workers[0].settings.prefill.port, workers[1].settings.prefill.port]
    assert router.settings.router.prefill_workers == tuple(f"127.0.0.1:{port}" for port in ports)
    assert router.settings.router.decode_workers == (
        f"127.0.0.1:{workers[2].settings.decode.port}",
    )
    chosen = {*ports, workers[2].settings.decode.port, router.settings.router.port}
    assert len(chosen) == 4
    assert 0 not in chosen


def test_without_prefill_workers_decode_computes_prompts() -> None:
    decode, router = planned(up=UpSection(prefills=0))
    assert decode.settings.decode.computes_prompts
    assert router.settings.router.prefill_workers == ()


def test_a_child_reads_its_settings_back_from_its_flags_and_gets_no_secret() -> None:
    for plan in planned(
        api_key=SecretStr("sentinel"),
        engine=EngineSection(speculate=False, draft_length=5),
        decode=DecodeSection(num_slots=3),
    ):
        flags = CliApp.serialize(plan.settings)
        assert "sentinel" not in " ".join(flags)
        command = COMMANDS[plan.command]
        read = load(command.settings, flags, program="x", shown=command.shown, flat=command.flat)
        assert read.model_dump() == plan.settings.model_dump()


def test_cores_are_divided_among_workers_unless_said_otherwise() -> None:
    plan = next(
        plan for plan in planned(decode=DecodeSection(threads=7)) if plan.command == "decode"
    )
    assert plan.num_threads == 7
    assert all(plan.num_threads == 1 for plan in planned(up=UpSection(prefills=64, decodes=64)))


def test_workers_of_one_machine_serve_their_metrics_on_ports_of_their_own() -> None:
    deployed = planned(up=UpSection(prefills=2), prefill=PrefillSection(admin_port=9100))
    ports = [p.settings.prefill.admin_port for p in deployed if p.command == "prefill"]
    assert ports == [9100, 9101]
    assert all(p.settings.decode.admin_port == 0 for p in deployed)
