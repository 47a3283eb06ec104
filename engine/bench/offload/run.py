"""The measures of `turnkeep bench offload`, one after the other. What fails, or finds no time, takes no other with it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.bench.offload.budget import Budget, OutOfTimeError
from engine.bench.offload.engines import Engines
from engine.bench.offload.pools import Pools
from engine.bench.offload.rates import measure_rates
from engine.bench.offload.report import OffloadBench, OffloadReport
from engine.bench.offload.single import measure_restart, measure_stores
from engine.bench.offload.workload import working_set
from engine.bench.offload.worth import measure_worth
from offload.arena import SHARED_MEMORY

logger = logging.getLogger(__name__)


def run_offload_bench(engines: Engines, bench: OffloadBench, say: Callable[[str], None]) -> OffloadReport:
    """Runs it, and says what is under way. Leaves nothing in shared memory or in the directory. An interrupt ends it, with what
    has been measured."""
    report = OffloadReport(engines.block_bytes, working_set(bench.sessions, engines.block_size))
    budget = Budget(bench.budget, say)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared, tempfile.TemporaryDirectory(dir=bench.directory) as below:
        pools = Pools(engines, bench, report, Path(shared), budget)

        def rates() -> None:
            blocks = max(16, bench.rate_bytes // engines.block_bytes)
            report.rates = measure_rates(engines.block_bytes, blocks, bench.directory)

        works: dict[str, Callable[[], None]] = {
            "rates": rates,
            "stores": lambda: measure_stores(engines, bench, report, Path(shared), budget),
            "restart": lambda: measure_restart(engines, bench, report, Path(shared), Path(below), budget),
            "worth": lambda: measure_worth(engines, bench, report, Path(shared), Path(below), budget),
            "pools": pools.pools,
            "overload": pools.overload,
            "shared": pools.shared,
        }
        for name in bench.measures:
            try:
                budget.began(name)
                works[name]()
            except OutOfTimeError as error:
                report.missing[name] = str(error)
            except KeyboardInterrupt:
                report.missing[name] = "it was interrupted"
                report.failed = True
                break
            except Exception as error:
                logger.exception("%s could not be measured", name)
                report.missing[name] = str(error) or type(error).__name__
                report.failed = True
    return report
