"""AdamW over flat buffers. Each function returns trials: see triton_gpu.py."""

from triton_cases import DEV, rel


def optim(M):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.optimizer.reference import AdamWSettings, AdamWState, adamw_reference
    from ridgeline.ops.optimizer.triton import adamw_raw, workspace

    w0, g0 = torch.randn(M, device=DEV), torch.randn(M, device=DEV)

    def make():
        def zeros(*n, **k):
            return torch.zeros(*n, device=DEV, **k)

        return AdamWState(
            w0.clone(),
            g0.clone(),
            zeros(M),
            zeros(M),
            zeros(M, dtype=torch.bfloat16),
            M // 2 // 128 * 128,
            torch.full((1,), 1e-3, device=DEV),
            zeros(2, dtype=torch.int64),
            zeros(1),
            zeros(2, dtype=torch.int64),
            zeros(64, 4),
            zeros(1),
        )

    S = AdamWSettings()
    ref = make()
    adamw_reference(ref, S)
    trials = []
    for plan, update in (
        ((2048, 8, 2), (1024, 4)),
        ((2048, 8, 4), (1024, 4)),
        ((4096, 8, 2), (1024, 4)),
        ((4096, 4, 4), (1024, 4)),
        ((2048, 8, 2), (512, 4)),
        ((2048, 8, 2), (2048, 8)),
        ((2048, 8, 2), (1024, 8)),
        ((2048, 8, 2), (2048, 4)),
    ):
        cp, cu = (
            Launch(rows=1, columns=plan[0], warps=plan[1], per_processor=plan[2]),
            Launch(rows=1, columns=update[0], warps=update[1]),
        )
        st, work = make(), workspace(w0.device)

        def run(st=st, work=work, cp=cp, cu=cu):
            adamw_raw(st, S, work, plan=cp, update=cu)

        def check(st=st):
            return {
                "step": rel(st.weights - w0, ref.weights - w0),
                "norm": rel(st.ring[:1], ref.ring[:1]),
                "count": abs(int(st.seed_step[1]) - 1) + int(st.skipped[0]),
            }

        def snapshot(st=st):
            out = [st.weights.clone(), st.ring.clone()]
            for a, b in zip(st, make()):
                if isinstance(a, torch.Tensor):
                    a.copy_(b)
            return out

        trials.append(
            dict(
                name=f"n{plan} u{update}".replace(", ", "/"),
                run=run,
                check=check,
                state=snapshot,
                bytes=M * 34 + M * 4 - M * 4,
                limit=1e-4,
            )
        )
    p = torch.nn.Parameter(w0.clone())
    p.grad = g0.clone()
    opt = torch.optim.AdamW([p], lr=1e-3, fused=True, capturable=True)

    def torch_step():
        torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True)
        opt.step()
        p.detach().bfloat16()

    trials.append(dict(name="torch one flat parameter", run=torch_step))
    return trials
