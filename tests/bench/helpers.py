"""Records for the tests of what is read out of them."""

from ridgeline.records import ContenderResult, Record, WorkloadInfo


def record(*contenders: ContenderResult, date: str = "2026-12-01T00:00:00+00:00", batch: int = 512) -> Record:
    return Record(
        kind="bench",
        date=date,
        git="0123456789abc",
        card="card",
        gpus=1,
        versions={},
        workload=WorkloadInfo(name="hal-20m", batch=batch, context=256, precision="bf16"),
        contenders=list(contenders),
    )
