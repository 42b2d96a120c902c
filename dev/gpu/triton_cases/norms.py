"""Norms: alone, joined with the residual write, padded rows. Each function returns trials: see triton_gpu.py."""

from triton_cases import DEV, rand, rel, state


def norm_forward(N, C, kind):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.norm.reference import norm_reference, residual_norm_reference
    from ridgeline.ops.norm.triton import norm_forward_raw

    T, joined, dropped = 256, kind != "alone", kind.endswith("drop")
    x, res, w, b, bb = rand(N, C), rand(N, C), rand(C), rand(C), rand(C)
    r, h = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(N, device=DEV), torch.empty(N, device=DEV)
    st = state()
    extra = dict(r_NC=r, residual_NC=res, branch_bias_C=bb) if joined else {}
    if dropped:
        extra |= dict(T=T, p=0.2, dropout=st, site=5)
    B = N // T
    if joined:
        r0, h0 = residual_norm_reference(
            x.view(B, T, C).float(),
            res.view(B, T, C).float(),
            w.float(),
            b.float(),
            eps=1e-5,
            kind="layernorm",
            branch_bias_C=bb.float(),
            p=0.2 if dropped else 0.0,
            dropout=st if dropped else None,
            site=5,
        )
    else:
        h0 = norm_reference(x.float(), w.float(), b.float(), eps=1e-5, kind="layernorm")

    def check():
        e = {"h": rel(h, h0)}
        if joined:
            e["r"] = rel(r, r0)
            e["h"] = rel(h, norm_reference(r.float(), w.float(), b.float(), eps=1e-5, kind="layernorm"))
        return e

    def make(cfg):
        def run():
            norm_forward_raw(x, w, b, h, mean, rstd, eps=1e-5, kind="layernorm", config=cfg, **extra)

        return run

    configs = [(4, 4), (4, 2), (4, 1)]
    trials = []
    for rows, warps in configs:

        def poisoned(run=make(Launch(rows=rows, warps=warps))):
            run()

        trials.append(
            dict(
                name=f"r{rows}w{warps}",
                run=poisoned,
                check=lambda: check(),
                state=lambda: [h.clone(), r.clone(), rstd.clone()],
                outs=[h, rstd, mean] + ([r] if joined else []),
                bytes=N * C * (8 if joined else 4),
            )
        )
    r.fill_(0)
    F = torch.nn.functional
    if not joined:
        trials.append(dict(name="torch", run=lambda: F.layer_norm(x, (C,), w, b)))
    return trials


def norm_backward(N, C, kind):
    import torch

    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.dropout import hidden_keep, quantise
    from ridgeline.ops.norm.reference import norm_reference
    from ridgeline.ops.norm.triton import norm_backward_raw, norm_forward_raw, partial_rows

    T, joined, dropped = 256, kind != "alone", kind.endswith("drop")
    r, dh, dres, w, b = rand(N, C), rand(N, C), rand(N, C), rand(C), rand(C)
    mean, rstd, h = torch.empty(N, device=DEV), torch.empty(N, device=DEV), torch.empty_like(r)
    norm_forward_raw(r, w, b, h, mean, rstd, eps=1e-5, kind="layernorm")
    dr, dy = torch.empty_like(r), torch.empty_like(r)
    st = state()
    X, W, Bb = (t.float().requires_grad_() for t in (r, w, b))
    gx, gw, gb = torch.autograd.grad(norm_reference(X, W, Bb, eps=1e-5, kind="layernorm"), [X, W, Bb], dh.float())
    if joined:
        gx = gx + dres.float()
    gy = gx
    if dropped:
        gy = gx * hidden_keep(st, 5, (N // T, T, C), 0.2, r.device).view(N, C) * quantise(0.2)[1]
    gbb = gy.sum(0)
    parts_out = torch.zeros((3 if joined else 2) * C, device=DEV)
    extra = dict(dresidual_NC=dres, branch_bias=True) if joined else {}
    if dropped:
        extra |= dict(T=T, p=0.2, dropout=st, site=5, dbranch_NC=dy)

    configs = [
        (1, 1, 8, 2),
        (1, 1, 12, 2),
        (1, 1, 16, 2),
        (1, 1, 12, 3),
        (1, 1, 8, 4),
        (2, 1, 8, 2),
        (2, 1, 6, 2),
        (2, 1, 8, 3),
        (2, 1, 6, 3),
        (2, 1, 4, 4),
        (2, 2, 8, 2),
        (2, 2, 4, 3),
    ]
    if C == 1024:
        configs = [(1, 1, 8, 2), (1, 2, 4, 2), (1, 2, 6, 2), (1, 2, 4, 3), (1, 2, 6, 1), (2, 4, 2, 2)]
    if C == 768:
        configs = [(1, 2, 4, 2), (1, 4, 6, 2), (1, 4, 6, 3), (1, 4, 4, 3), (2, 4, 4, 2), (2, 4, 4, 3), (1, 2, 6, 3)]
    if N == 8192:
        configs = [
            (1, 1, 4, 1),
            (1, 1, 8, 1),
            (1, 1, 16, 1),
            (1, 1, 4, 3),
            (1, 1, 4, 4),
            (1, 1, 8, 3),
            (2, 1, 2, 2),
            (2, 1, 4, 1),
            (2, 1, 4, 2),
            (2, 1, 4, 3),
            (2, 1, 8, 2),
            (2, 1, 16, 1),
        ]
    trials = []
    for rows, warps, per, stages in configs:
        cfg = Launch(rows=rows, warps=warps, per_processor=per, stages=stages)
        parts = torch.empty(partial_rows(N, C, r, cfg), parts_out.numel(), device=DEV)

        def run(cfg=cfg, parts=parts):
            norm_backward_raw(dh, r, w, mean, rstd, parts, kind="layernorm", bias=True, dr_NC=dr, config=cfg, **extra)

        def check(parts=parts):
            column_sums_raw(parts, parts_out, accumulate=False)
            e = {"dr": rel(dr, gx), "dw": rel(parts_out[:C], gw), "db": rel(parts_out[C : 2 * C], gb)}
            if joined:
                e["dbb"] = rel(parts_out[2 * C :], gbb)
            if dropped:
                e["dy"] = rel(dy, gy)
            return e

        trials.append(
            dict(
                name=f"r{rows}w{warps}p{per}s{stages}",
                run=run,
                check=check,
                state=lambda parts=parts: [dr.clone(), parts.clone()] + ([dy.clone()] if dropped else []),
                outs=[dr, dy, parts],
                bytes=N * C * (10 if dropped else 8 if joined else 6),
            )
        )
    if not joined:
        x2, w2, b2 = (t.clone().requires_grad_() for t in (r, w, b))
        out, m, s = torch.native_layer_norm(x2.detach(), (C,), w, b, 1e-5)
        trials.append(
            dict(
                name="torch",
                run=lambda: torch.ops.aten.native_layer_norm_backward(dh, r, (C,), m, s, w, b, [True, True, True]),
            )
        )
    return trials


def norm_padded(N, C, W, S, backward):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.norm.reference import norm_reference
    from ridgeline.ops.norm.triton import norm_backward_raw, norm_forward_raw, partial_rows

    joint, w, b = rand(N, S), rand(C), rand(C)
    x, h = joint[:, :W], rand(N, W)
    mean, rstd = torch.empty(N, device=DEV), torch.empty(N, device=DEV)
    X = x[:, :C].float().requires_grad_()
    h0 = norm_reference(X, w.float(), b.float(), eps=1e-5, kind="layernorm")
    trials = []
    if not backward:
        for rows, warps in ((4, 4), (4, 8), (2, 4), (1, 1), (2, 1), (1, 2)):
            cfg = Launch(rows=rows, warps=warps)
            trials.append(
                dict(
                    name=f"r{rows}w{warps}",
                    run=lambda cfg=cfg: norm_forward_raw(
                        x, w, b, h, mean, rstd, eps=1e-5, kind="layernorm", columns=C, config=cfg
                    ),
                    check=lambda: {"h": rel(h[:, :C], h0.detach()), "pad": float(h[:, C:].float().abs().sum())},
                    state=lambda: [h.clone()],
                    outs=[h],
                    bytes=N * W * 4,
                )
            )
        return trials
    norm_forward_raw(x, w, b, h, mean, rstd, eps=1e-5, kind="layernorm", columns=C)
    dh, out = rand(N, W), min(C, 512)
    dres, dr = rand(N, out), rand(N, out)
    (gx,) = torch.autograd.grad(h0, X, dh[:, :C].float())
    gx = gx[:, :out] + dres.float()
    for rows, warps, per, stages in ((1, 1, 8, 2), (1, 2, 4, 2), (1, 2, 6, 2), (1, 2, 6, 1), (2, 4, 3, 2)):
        cfg = Launch(rows=rows, warps=warps, per_processor=per, stages=stages)
        parts = torch.empty(partial_rows(N, W, x, cfg), 2 * C, device=DEV)
        trials.append(
            dict(
                name=f"r{rows}w{warps}p{per}s{stages}",
                run=lambda cfg=cfg, parts=parts: norm_backward_raw(
                    dh,
                    x,
                    w,
                    mean,
                    rstd,
                    parts,
                    kind="layernorm",
                    bias=True,
                    columns=C,
                    dresidual_NC=dres,
                    dr_NC=dr,
                    config=cfg,
                ),
                check=lambda: {"dr": rel(dr, gx)},
                state=lambda: [dr.clone()],
                outs=[dr, parts],
                bytes=N * (W * 4 + out * 4),
            )
        )
    return trials
