"""Predict the classes of many images, clean or attacked, into a log (PREDICT of Cohen et al., 2019)."""

from smoothadv.evaluation.attacked_images import PredictionPolls, attack_record, fit_to_job
from smoothadv.evaluation.log_writing import LogPlan, write_log
from smoothadv.evaluation.requests import PredictRequest
from smoothadv.evaluation.smoothing_job import check_top_k, prepare, warn_of_few_draws


def predict(request: PredictRequest) -> bool:
    """Write the missing rows of the log ``request.outfile``; False where this process has written only a share of it.

    UserError where the request cannot be carried out, possibly after some rows; the log keeps the rows written so far.
    """
    job = prepare(request, request.outfile)
    check_top_k(request.top_k, job.dataset.description)
    warn_of_few_draws(request, request.top_k)
    attack = None if request.attack is None else fit_to_job(request.attack, job, request, request.outfile)
    polls = PredictionPolls(job, attack, request.n, request.alpha, request.top_k)
    plan = LogPlan(
        request=request,
        path=request.outfile,
        columns=polls.columns,
        settings={"N": request.n, **attack_record(attack), **({"top_k": request.top_k} if request.top_k > 1 else {})},
        make_polls=polls,
        description="predicting",
        attack=attack,
    )
    return write_log(job, plan)
