"""Pages of each kind, of things that are made in no time."""

from tensile_jax.pages import comparison_page, memory_page, plan_page, run_page
from tensile_jax.pages.page import Page
from tensile_jax.plan.comparison import AtBudget, Comparison, Entry
from tests.cli.plans import PLAN
from tests.cli.records import WITH_STAGES
from tests.memory_report.reports import report_of


def entry(policy: str, budget: int | None, peak: int, eor: float) -> Entry:
    return Entry(policy, budget, peak, 100 * eor, 1.0, 2.0, 512, 3, 1 - peak / 4096, eor)  # pyright: ignore[reportArgumentType]


def comparison() -> Comparison:
    vanilla, whole = entry("none", None, 4096, 1.0), entry("auto", None, 4200, 0.95)
    under = (entry("auto", 2048, 2048, 1.1), entry("vdnn", 2048, 2040, 2.0))
    return Comparison(
        "step", "cpu", "any", vanilla, whole, ((under[1], under[0]),), (AtBudget(0.5, 2048, under, 1.05, 3.0),),
        (entry("auto", 4096, 4000, 1.0), entry("auto", 0, 1024, 1.5)),
    )  # fmt: skip


def pages() -> dict[str, Page]:
    report = report_of(40)
    return {
        "memory": memory_page.page_of(report),
        "plan": plan_page.page_of(PLAN, memory=report),
        "run": run_page.page_of(WITH_STAGES, title="Device memory of a run", jit_peaks={}),
        "comparison": comparison_page.page_of(comparison()),
    }
