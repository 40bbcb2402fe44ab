"""`dspark checkpoint validate`: is everything there that a server needs, and is it intact."""

from __future__ import annotations

import json

from common.checkpoint.contract import check_contract
from common.checkpoint.contract_report import ContractReport
from common.checkpoint.other_contracts import check_dspark, check_upstream_123
from services.cli.checkpoint_settings import ValidateSettings
from services.cli.checkpoints import OpenCheckpoint, checkpoint_failures, open_checkpoint
from services.cli.failures import EXIT_MODEL, EXIT_OK

CHECKS = {"served": check_contract, "dspark": check_dspark, "upstream-123": check_upstream_123}


def run(settings: ValidateSettings) -> int:
    opened = open_checkpoint(settings.checkpoint)
    report = CHECKS[settings.contract](opened.config, opened.headers)
    if settings.output == "json":
        print(json.dumps(_as_json(report)))
    else:
        _show(report)
        if not (opened.folder / "tokenizer.json").is_file():
            print("  note: there is no tokenizer.json, without which a router does not start")
    if not report.is_met:
        return EXIT_MODEL
    if settings.deep or settings.record_digests:
        _read_all(opened, record=settings.record_digests, is_quiet=settings.output == "json")
    return EXIT_OK


def _show(report: ContractReport) -> None:
    print(f"contract {report.contract}: {report.summary()}")
    for line in report.by_group():
        print(f"  {line}")
    if report.extra:
        print(f"  {len(report.extra)} tensors that nothing takes:")
        for group in report.extra_groups():
            print(f"    {group}")
    if report.num_classic_mtp:
        print(f"  {report.num_classic_mtp} tensors of a classic MTP layer are not used")
    for note in report.notes:
        print(f"  note: {note}")


def _as_json(report: ContractReport) -> dict[str, object]:
    return {
        "contract": report.contract,
        "is_met": report.is_met,
        "summary": report.summary(),
        "num_expected": report.num_expected,
        "faults": [
            {"name": f.name, "group": f.group, "kind": f.kind, "detail": f.detail}
            for f in report.faults
        ],
        "extra": list(report.extra),
        "extra_groups": {each.group: len(each.names) for each in report.extra_groups()},
        "num_classic_mtp": report.num_classic_mtp,
        "notes": list(report.notes),
    }


def _read_all(opened: OpenCheckpoint, *, record: bool, is_quiet: bool) -> None:
    with checkpoint_failures():
        from common.checkpoint.integrity import read_all

        checked = read_all(opened.folder, opened.headers, record=record)
    if not is_quiet:
        print(
            f"read {checked.num_bytes / 1e6:.0f} MB at {checked.mb_per_s:.0f} MB/s: scales are sane, no matrix is empty; "
            f"{checked.num_digests} of {len(opened.headers)} tensors were compared with a digest"
            + ("; digests written" if record else "")
        )
