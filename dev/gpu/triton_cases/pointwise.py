"""Bias and GELU, dropout, column sums. Each function returns trials: see triton_gpu.py."""

from triton_cases import DEV, rand, rel, state


def sums(P, W):
    import torch

    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops._triton.support import Launch

    dtype = torch.bfloat16 if W > 40000 else torch.float32
    parts, out = torch.randn(P, W, device=DEV).to(dtype), torch.zeros(W, device=DEV)
    trials = []
    small = [
        (64, 16, 4, 1),
        (128, 16, 4, 1),
        (128, 16, 8, 1),
        (256, 16, 8, 1),
        (128, 32, 8, 1),
        (256, 8, 4, 1),
        (256, 8, 8, 1),
        (64, 16, 4, 3),
        (128, 8, 4, 2),
        (512, 8, 8, 1),
        (32, 32, 4, 4),
        (64, 32, 4, 1),
        (64, 32, 4, 3),
        (128, 32, 4, 2),
    ]
    big = [
        (32, 128, 4, 1),
        (16, 128, 4, 1),
        (8, 256, 4, 1),
        (32, 128, 4, 3),
        (16, 128, 2, 4),
        (8, 128, 1, 1),
        (16, 256, 4, 3),
        (32, 64, 4, 3),
        (8, 256, 4, 4),
        (64, 128, 8, 1),
    ]
    for rows, cols, warps, stages in small if W < 30000 else big:
        cfg = Launch(rows=rows, columns=cols, warps=warps, stages=stages)
        trials.append(
            dict(
                name=f"r{rows}c{cols}w{warps}s{stages}",
                run=lambda cfg=cfg: column_sums_raw(parts, out, accumulate=False, launch=cfg),
                check=lambda: {"s": rel(out, parts.double().sum(0))},
                state=lambda o=out: [o.clone()],
                outs=[out],
                bytes=P * W * parts.element_size(),
            )
        )
    trials.append(dict(name="torch", run=lambda: parts.sum(0)))
    return trials


def act(N, F, backward):
    import torch

    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.activation.reference import bias_gelu_reference
    from ridgeline.ops.activation.triton import bias_gelu_backward_raw, bias_gelu_forward_raw, partial_rows

    x, d, b = rand(N, F), rand(N, F), rand(F)
    out = torch.full_like(x, float("nan"))
    n = min(N, 8192)
    X, Bb = x[:n].double().requires_grad_(), b.double().requires_grad_()
    ref = bias_gelu_reference(X, Bb, kind="exact")
    (gx,) = torch.autograd.grad(ref, X, d[:n].double())
    trials = []
    if not backward:
        for rows, cols, warps in ((2, 1024, 4), (1, 1024, 2), (1, 1024, 4), (2, 512, 2), (1, 2048, 8), (2, 2048, 8)):
            cfg = Launch(rows=rows, columns=cols, warps=warps)
            trials.append(
                dict(
                    name=f"r{rows}c{cols}w{warps}",
                    run=lambda cfg=cfg: bias_gelu_forward_raw(x, b, out, kind="exact", config=cfg),
                    check=lambda: {"out": rel(out[:n], ref)},
                    state=lambda: [out.clone()],
                    outs=[out],
                    bytes=N * F * 4,
                )
            )
        trials.append(
            dict(name="tanh r4c512w4", run=lambda: bias_gelu_forward_raw(x, b, out, kind="tanh"), bytes=N * F * 4)
        )
        trials.append(dict(name="torch (no bias)", run=lambda: torch.nn.functional.gelu(x)))
        return trials
    for rows, cols, warps, per, stages in (
        (2, 1024, 4, 4, 1),
        (2, 1024, 4, 4, 2),
        (2, 1024, 4, 3, 3),
        (1, 1024, 4, 8, 1),
        (1, 1024, 2, 8, 1),
        (1, 1024, 4, 4, 3),
        (1, 512, 1, 8, 1),
        (1, 512, 1, 8, 2),
        (2, 512, 2, 8, 1),
        (2, 512, 2, 4, 2),
        (1, 256, 1, 8, 2),
    ):
        cfg = Launch(rows=rows, columns=cols, warps=warps, per_processor=per, stages=stages)
        parts = torch.empty(partial_rows(N, F, x, cfg), F, device=DEV)
        db = torch.zeros(F, device=DEV)

        def check(parts=parts, db=db):
            column_sums_raw(parts, db, accumulate=False)
            return {"dx": rel(out[:n], gx), "db": rel(db, out.double().sum(0))}

        trials.append(
            dict(
                name=f"r{rows}c{cols}w{warps}p{per}s{stages}",
                run=lambda cfg=cfg, parts=parts: bias_gelu_backward_raw(d, x, b, out, parts, kind="exact", config=cfg),
                check=check,
                state=lambda: [out.clone()],
                outs=[out],
                bytes=N * F * 6,
                limit=2e-2,
            )
        )
    trials.append(dict(name="torch (no bias)", run=lambda: torch.ops.aten.gelu_backward(d, x)))
    return trials


def drop(B, T, C):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.dropout import hidden_keep, quantise
    from ridgeline.ops.dropout.triton import dropout_raw

    st, x = state(), rand(B * T, C)
    out = torch.full_like(x, float("nan"))
    ref = (
        (x.view(B, T, C).float() * hidden_keep(st, 5, (B, T, C), 0.2, x.device) * quantise(0.2)[1])
        .bfloat16()
        .view(-1, C)
    )
    trials = []
    for rows, warps in ((1, 1), (2, 1), (2, 4), (4, 4), (8, 4), (8, 8)):
        cfg = Launch(rows=rows, warps=warps)
        trials.append(
            dict(
                name=f"r{rows}w{warps}",
                run=lambda cfg=cfg: dropout_raw(x, out, T, 0.2, st, 5, config=cfg),
                check=lambda: {"differs": float((out != ref).sum())},
                state=lambda: [out.clone()],
                outs=[out],
                bytes=B * T * C * 4,
                limit=0.5,
            )
        )
    trials.append(dict(name="torch", run=lambda: torch.nn.functional.dropout(x, 0.2)))
    return trials
