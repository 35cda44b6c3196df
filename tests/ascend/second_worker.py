# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Runs msopmodeling 1.0.9, in the environment that second.sh made:

    second_worker.py JOBS ANSWERS       launches of ours
    second_worker.py named ANSWERS      its own models of named operators, beside its profiles

Two things of it are corrected: a flag within a core is looked for where it was put (it is kept by
the pipe that waits, and looked for by the pipe that sets, so that none is ever waited for), and
comparisons and selections, whose cycles its table has, get their names.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

HOME = Path(find_spec("tilesim").submodule_search_locations[0])  # type: ignore[union-attr,index]
sys.path.insert(0, str(HOME))

from core.backend.engineering_costmodel.evaluation.by_rule_pipeline import (  # noqa: E402
    eval_by_rule_pipe as rules,
)
from core.backend.engineering_costmodel.evaluation.by_rule_pipeline.pipe_manager import (  # noqa: E402
    CoreUnitPipeKey,
    PipeManager,
)
from core.common.backend_config import (  # noqa: E402
    BackendConfig,
    EvalConfig,
    OptimConfig,
    OptimType,
)
from core.common.tile_op_enum import TileOpCode  # noqa: E402
from core.frontend.adaptor.hivm import hivm_op_mapping  # noqa: E402
from core.pipeline.hivm.hivm_to_eng_sim import hivm_to_eng_sim  # noqa: E402

logging.disable(logging.WARNING)
hivm_op_mapping.HIVM_OP_MAPPING |= {
    "hivm.hir.vcmp": TileOpCode.GREATER_EQUAL,
    "hivm.hir.vsel": TileOpCode.SELECT,
}
_FROM_MEMORY = {"910B1": 1638.4e9, "910B4-1": 3276.8e9}  # its GM to L2, which no copy is charged

_asked = PipeManager.wait_unit_flag


def _wait(self: PipeManager, src: Any, dst: Any, flag: str) -> float:
    if flag.startswith("block_"):
        return _asked(self, src, dst, flag)
    key = CoreUnitPipeKey(dst, self.core_index)
    now = self.pipe_dict.get(key, 0.0)
    return self.unit_wait_manager.get(flag, {}).get(key, now)


PipeManager.wait_unit_flag = _wait


class Rules(rules.EvalRulePipeImpl):
    """Keeps what each operation took on its pipes, and what it read from memory."""

    def _reset_state(self) -> None:
        super()._reset_state()
        taken.clear()

    def _l2_access(self, *given: Any) -> Any:
        hit, miss = super()._l2_access(*given)
        missed.append(miss)
        return hit, miss

    def _calc_subtask_pipe(self, sub_task: Any) -> None:
        before = self.pipe_manager.update_pipe_working

        def working(latency: dict[Any, float]) -> None:
            before(latency)
            taken.append((dict(latency), sum(missed)))
            missed.clear()

        self.pipe_manager.update_pipe_working = working
        super()._calc_subtask_pipe(sub_task)
        self.pipe_manager.update_pipe_working = before


taken: list[tuple[dict[Any, float], float]] = []
missed: list[float] = []


def answer(job: dict[str, Any]) -> dict[str, Any]:
    spec = HOME / f"core/config/arc_config/{job['spec']}/{job['spec']}.yaml"
    evaluated = EvalConfig()
    evaluated.set_default_fit_param()
    config = BackendConfig(
        accelerator=str(spec),
        aic_core_num=job["programs"],
        aiv_core_num=job["programs"] * (2 if job["mixed"] else 1),
        eval_config=evaluated,
        optim_config=OptimConfig(OptimType.ADAPTOR_BYPASS_OPTIM),
    )
    result = hivm_to_eng_sim(job["text"], config, {}, None)
    weights = [x for x in job["weights"] if x]
    if len(weights) != len(taken):
        raise ValueError(f"{job['kernel']}: {len(weights)} operations, {len(taken)} simulated")
    given, whole, bytes_ = Counter[str](), Counter[str](), 0.0
    for weight, (latency, miss) in zip(weights, taken, strict=True):
        for unit, us in latency.items():
            given[unit.name] += us  # type: ignore[assignment]
            whole[unit.name] += weight * us  # type: ignore[assignment]
        bytes_ += weight * miss
    most = max(whole.values(), default=0.0)
    us = result.latency * (most / max(given.values()) if most else 1.0)
    unit = max(whole, key=lambda x: whole[x]) if most else "nothing"
    us = max(us, most)
    memory = bytes_ * job["programs"] / _FROM_MEMORY[job["spec"]] * 1e6
    if memory > us:
        us, unit = memory, "memory"
    share = 100 * most / us if us else 100.0
    return dict(seconds=us * 1e-6, binds=f"{unit.lower()} {share:.0f}% busy")


# profiles of a 910B4-1, of operators that it has a model of
_PROFILES = (
    "lightning_indexer/lightningindexer_zhanlu_profiling_910B4_1.csv",
    "sparse_flash_attention/"
    "sparseflashattention_command_optimized_deepseekv3.2_bf16_001_910B4_1.csv",
    "sparse_flash_attention/sparseflashattention_zhanlu_profiling_910B4_1.csv",
    "matmul/matmulv2_zhanlu_profiling_910B4_1.csv",
    "matmul/matmulv3_zhanlu_profiling_910B4_1.csv",
)
_RUNS = 5  # at least, of a shape


def named() -> list[dict[str, Any]]:
    """Each shape of its profiles: the median of so many runs, and what its model says, us."""
    import pandas
    from api.operator_api.models.operator_api_models import OperatorPredictRequest
    from api.operator_api.op_latency_predict_engineering import op_latency_predict

    from tests.st.profiling_convert_util import ProfilingDataFormat, get_profiling_data

    spec = str(HOME / "core/config/arc_config/910B4-1/910B4-1.yaml")
    found = []
    for name in _PROFILES:
        table = pandas.read_csv(HOME / "tests/st/ops_accuracy/eng_ops_classic" / name)
        shapes: dict[str, list[Any]] = {}
        for _, row in table.iterrows():
            taken = get_profiling_data(row, ProfilingDataFormat.ZHANLU)
            key = f"{taken['input_shapes']} {taken['output_shapes']} {taken['block_dim']}"
            shapes.setdefault(key, []).append(taken)
        for rows in shapes.values():
            if len(rows) < _RUNS:
                continue
            first = rows[0]
            request = OperatorPredictRequest(
                op_name=first["op_name"],
                input_shapes=first["input_shapes"],
                output_shapes=first["output_shapes"],
                input_precision=first["input_precision"],
                output_precision=first["output_precision"],
                accelerator=spec,
                core_num=first["block_dim"],
                extra_param=first.get("extra_param"),
            )
            found.append(
                dict(
                    op=first["op_name"],
                    shapes=first["input_shapes"][: 2 if "MatMul" in first["op_name"] else None],
                    cores=int(first["block_dim"]),
                    runs=len(rows),
                    us=round(median(x["profiling_time"] for x in rows), 1),
                    second=round(op_latency_predict(request)["latency"], 1),
                )
            )
    return found


def main() -> None:
    if sys.argv[1] == "named":
        Path(sys.argv[2]).write_text(json.dumps(named()))
        return
    rules.EvalRulePipeImpl = Rules
    from core.backend.engineering_costmodel.evaluation import eng_evaluation_dispatch as dispatch

    dispatch.EvalRulePipeImpl = Rules
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(job) for job in jobs]))


if __name__ == "__main__":
    main()
