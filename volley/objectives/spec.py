"""The objectives that a run can optimise: one frozen pydantic model per `kind`.

Notation used in this package: a group has `n` samples of one prompt with rewards `g_1..g_n`; the objective is
the expected value of some function of `k <= n` of them. Shape suffixes: `B` groups, `N` samples of a group.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, TypeAdapter, model_validator

from volley.base import Spec
from volley.objectives.tries import Terms, Weights, check_tries, terms_of
from volley.plugins import OBJECTIVES, OpenUnion, kinds_of

Baseline: TypeAlias = Literal["none", "loo", "subset_loo", "loo_minus_one"]
CompanionWeights: TypeAlias = Literal["none", "exact", "first_order", "self_normalised"]
WeightCap: TypeAlias = Annotated[float, Field(gt=0)] | None


class ObjectiveBase(Spec):
    """Fields that all objectives have, including those of plug-ins.

    center: subtract the mean advantage of the group (arXiv 2503.19595, eq. 3); trades bias for variance.
    normalize: `none`, or `std` to divide by the population standard deviation of the group's rewards (GRPO).
    focal: gamma of the group's weight `(1 - mean reward)^gamma`, which trains less on what is mostly solved (F-GRPO,
        arXiv 2602.06717); biased, for rewards from 0 to 1.
    """

    center: bool = False
    normalize: Literal["none", "std"] = "none"
    focal: float = Field(0.0, ge=0, description="weighs a group by (1 - its mean reward)^focal; 0: all alike")


class Mean(ObjectiveBase):
    """The expected reward of one sample; `a_i = (g_i - mean(g_-i)) / n` (REINFORCE leave-one-out)."""

    kind: Literal["mean"] = "mean"


class OverTries(ObjectiveBase):
    """An objective over k tries, or over several numbers of tries: the sum of w_k f@k."""

    k: int | None = Field(None, ge=1, description="the number of tries")
    weights: Weights | None = Field(
        None, description="instead of k: the weight of each k, as in {1: 0.5, 8: 0.5}; harmonic: 1/k for k = 1 .. order"
    )
    order: int | None = Field(None, ge=1, description="the largest k of weights: harmonic")

    @model_validator(mode="after")
    def _tries_are_given(self) -> Self:
        check_tries(self.k, self.weights, self.order)
        return self

    @property
    def terms(self) -> Terms:
        """The numbers of tries that count, each with its weight."""
        return terms_of(self.k, self.weights, self.order)


class MaxAtK(OverTries):
    """The expected best reward of k samples; pass@k on 0/1 rewards.

    weights: `harmonic` of order n - 1 with baseline `subset_loo` is MaxRL (arXiv 2602.02710) divided by n on 0/1
        rewards, and centred TailRL (arXiv 2609.02987) divided by n on any.
    baseline: `none` (arXiv 2505.15201 eq. 19), `loo` (its eq. 29), `subset_loo` (leave-one-out of the max@k
        estimate itself, the leave-p-out of arXiv 2503.19595 with p = n - k), `loo_minus_one` (eq. 33).
        All are unbiased; `none` and `loo_minus_one` allow k = n, the other two need k <= n - 1. At k = 1 each is
        REINFORCE leave-one-out.
    companion_weights: how the importance weights of the *other* samples of a set enter an off-policy estimate.
        `none` ignores them, `exact` is unbiased, `first_order` expands their product around 1 (after
        arXiv 2510.23393) and replaces a negative mean by 0, `self_normalised` is the exact form with all weights
        divided by a common factor that makes the mean weight of a k-set 1.
    weight_cap: companions' weights above this are truncated to it.
    """

    kind: Literal["max_at_k"] = "max_at_k"
    baseline: Baseline = "loo_minus_one"
    companion_weights: CompanionWeights = "none"
    weight_cap: WeightCap = None

    @model_validator(mode="after")
    def _companions_fit(self) -> Self:
        _check_weight_cap(self.companion_weights, self.weight_cap)
        _check_unbiased(self)
        if self.companion_weights == "first_order" and self.baseline != "loo_minus_one":
            raise ValueError(
                f"companion_weights: first_order is defined for baseline: loo_minus_one, not {self.baseline}; "
                "write companion_weights: exact, or baseline: loo_minus_one"
            )
        return self


class MajAtK(OverTries):
    """The expected reward of the majority answer among k samples, uniform over tied answers.

    The estimate has the `loo_minus_one` form; companion_weights and weight_cap are those of `max_at_k`.
    """

    kind: Literal["maj_at_k"] = "maj_at_k"
    companion_weights: Literal["none", "exact", "self_normalised"] = "none"
    weight_cap: WeightCap = None

    @model_validator(mode="after")
    def _companions_fit(self) -> Self:
        _check_weight_cap(self.companion_weights, self.weight_cap)
        _check_unbiased(self)
        return self


class BestOfK(OverTries):
    """The expected reward of the sample that ranks highest among k, uniform over tied ranks.

    Best-of-N as it is deployed (arXiv 2412.15287): a score other than the reward picks, such as public tests or a
    reward model, which the scorer returns as each sample's rank. The estimate has the `loo_minus_one` form;
    companion_weights and weight_cap are those of `max_at_k`.
    """

    kind: Literal["best_of_k"] = "best_of_k"
    companion_weights: Literal["none", "exact", "self_normalised"] = "none"
    weight_cap: WeightCap = None

    @model_validator(mode="after")
    def _companions_fit(self) -> Self:
        _check_weight_cap(self.companion_weights, self.weight_cap)
        _check_unbiased(self)
        return self


class Softmax(ObjectiveBase):
    """The softmax-weighted reward of the n samples: the mean at beta = 0, the max as beta grows.

    Source: arXiv 2503.19595, appendix B.2.
    """

    kind: Literal["softmax"] = "softmax"
    beta: Annotated[float, Field(ge=0)]


class PassAtKAnalytic(ObjectiveBase):
    """The group-normalised analytic pass@k advantage for 0/1 rewards (arXiv 2508.10751)."""

    kind: Literal["pass_at_k_analytic"] = "pass_at_k_analytic"
    k: Annotated[int, Field(ge=1)]


class MaxRL(ObjectiveBase):
    """`(g_i - mean) / mean` for non-negative rewards (arXiv 2602.02710).

    On 0/1 rewards this is n times `max_at_k` with weights: harmonic, order n - 1 and baseline: subset_loo.
    """

    kind: Literal["maxrl"] = "maxrl"


class RiskSensitive(ObjectiveBase):
    """`(exp(beta g_i) / mean exp(beta g) - 1) / beta` (arXiv 2509.24261); beta > 0 seeks risk."""

    kind: Literal["risk_sensitive"] = "risk_sensitive"
    beta: float

    @model_validator(mode="after")
    def _beta_is_not_zero(self) -> Self:
        if self.beta == 0:
            raise ValueError("beta = 0 is the mean objective; write kind: mean")
        return self


def _check_unbiased(objective: "MaxAtK | MajAtK | BestOfK") -> None:
    if objective.companion_weights != "none" and objective.center:
        raise ValueError(
            "center subtracts a mean in which every sample's own weight is divided out, which biases an off-policy "
            "estimate: write center: false, or companion_weights: none"
        )
    if objective.companion_weights != "none" and objective.focal:
        raise ValueError(
            "focal weighs a group by rewards of the older policy, which biases an off-policy estimate: write focal: 0, "
            "or companion_weights: none"
        )


def _check_weight_cap(companion_weights: CompanionWeights, weight_cap: float | None) -> None:
    if companion_weights == "none" and weight_cap is not None:
        raise ValueError(
            "weight_cap truncates companion weights, and there are none with companion_weights: none; "
            "drop weight_cap or write companion_weights: exact"
        )


Objective: TypeAlias = Annotated[
    Mean | MaxAtK | MajAtK | BestOfK | Softmax | PassAtKAnalytic | MaxRL | RiskSensitive,
    Field(discriminator="kind"),
    OpenUnion(OBJECTIVES),
]
ObjectiveWithK: TypeAlias = MaxAtK | MajAtK | BestOfK | PassAtKAnalytic
ObjectiveOverSets: TypeAlias = MaxAtK | MajAtK | BestOfK

# Their advantages are those of a mean over the samples, as published; all others have the mean's factor 1/n in them.
PER_SAMPLE = (PassAtKAnalytic, MaxRL, RiskSensitive)
BUILT_IN = kinds_of(Mean, MaxAtK, MajAtK, BestOfK, Softmax, PassAtKAnalytic, MaxRL, RiskSensitive)
OVER_TRIES = kinds_of(MaxAtK, MajAtK, BestOfK)

_ADAPTER: TypeAdapter[Objective] = TypeAdapter(Objective)


def parse_objective(value: Objective | Mapping[str, Any]) -> Objective:
    """An objective from a mapping such as `{"kind": "max_at_k", "k": 4}`; objectives pass through.

    Raises:
        pydantic.ValidationError (a ValueError): an unknown kind or key, or a value out of range.
    """
    return _ADAPTER.validate_python(value)


def leave_p_out(p: int, n: int, **fields: Any) -> MaxAtK:
    """The leave-p-out objective of arXiv 2503.19595 (eq. 5) on n samples, as a `MaxAtK`.

    It is max@(n - p) with the `subset_loo` baseline; p = 1 is that paper's biased pass@n estimator.

    Raises:
        ValueError: unless 1 <= p <= n - 1.
    """
    if not 1 <= p <= n - 1:
        raise ValueError(f"leave-p-out needs 1 <= p <= n - 1, got p={p}, n={n}; for p = 0 write k: {n}")
    return MaxAtK(k=n - p, baseline="subset_loo", **fields)


def weighs_companions(objective: Objective) -> bool:
    """Whether the estimate weighs the other samples of a set by their importance."""
    return isinstance(objective, ObjectiveOverSets) and objective.companion_weights != "none"


def spare_samples(objective: Objective) -> int:
    """How many samples beyond k a group needs for a defined estimate with signal: 0 or 1."""
    if isinstance(objective, PassAtKAnalytic):
        return 1
    if isinstance(objective, MaxAtK):
        needs = objective.baseline in ("loo", "subset_loo") or (objective.baseline == "none" and objective.center)
        return int(needs)
    return 0


def check_objective(objective: Objective | Mapping[str, Any], n: int) -> None:
    """Refuse a combination of objective and group size that is undefined or carries no signal.

    Raises:
        ValueError: with the change to make, for n < 2, a k > n, `loo`/`subset_loo` with k = n, a centred `none`
            baseline with k = n, and the analytic form with k = n.
    """
    objective = parse_objective(objective)
    if n < 2:
        raise ValueError(f"a group of n={n} samples has nothing to compare with; write n: 2 or more")
    if not isinstance(objective, ObjectiveWithK):
        return
    k = largest_k(objective)
    if k > n:
        raise ValueError(
            f"{objective.kind} {_tries_text(objective)} needs n >= {k} samples, got n={n}; {_lower(objective)}"
        )
    if k <= n - spare_samples(objective):
        return
    if isinstance(objective, PassAtKAnalytic):
        raise ValueError(
            f"pass_at_k_analytic with k = n = {n} is zero for every group; write k: {n - 1} or less, or kind: max_at_k"
        )
    if isinstance(objective, MaxAtK) and objective.baseline != "none":
        raise ValueError(
            f"baseline: {objective.baseline} leaves one sample out, so k = n = {n} is too large; "
            f"write baseline: loo_minus_one, or {_smaller(objective, n - 1)}"
        )
    raise ValueError(
        f"a centred max_at_k with baseline: none and k = n = {n} is zero for every group; "
        f"write baseline: loo_minus_one, or {_smaller(objective, n - 1)}"
    )


def largest_k(objective: ObjectiveWithK) -> int:
    """The largest number of tries that counts."""
    return objective.k if isinstance(objective, PassAtKAnalytic) else objective.terms[-1][0]


def _tries_text(objective: ObjectiveWithK) -> str:
    if isinstance(objective, PassAtKAnalytic) or objective.weights is None:
        return f"with k={objective.k}"
    return f"with order={objective.order}" if objective.order else f"with weights up to k={largest_k(objective)}"


def _lower(objective: ObjectiveWithK) -> str:
    if isinstance(objective, PassAtKAnalytic) or objective.weights is None:
        return "lower k or raise n"
    return "lower order or raise n" if objective.order else "remove the weights above n or raise n"


def _smaller(objective: ObjectiveWithK, largest: int) -> str:
    if isinstance(objective, PassAtKAnalytic) or objective.weights is None:
        return f"k: {largest} or less"
    return f"order: {largest} or less" if objective.order else f"weights of k up to {largest}"
