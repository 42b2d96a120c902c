"""Cross-entropy, from logits to their gradient. Each function returns trials: see triton_gpu.py."""

from triton_cases import DEV, rand, rel


def xent(N, V, W):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.cross_entropy.reference import cross_entropy_reference
    from ridgeline.ops.cross_entropy.triton import count_valid_raw, cross_entropy_raw, loss_partials, mean_loss_raw

    x, t = rand(N, W), torch.randint(0, V, (N,), device=DEV)
    x[:, V:] = float("nan")
    t[torch.rand(N, device=DEV) < 0.1] = -100
    counts = torch.zeros(64, dtype=torch.int32, device=DEV)
    d, loss = torch.full((N, W), float("nan"), device=DEV, dtype=torch.bfloat16), torch.zeros(1, device=DEV)
    count_valid_raw(t, counts)
    X = x[:, :V].float().requires_grad_()
    l0 = cross_entropy_reference(X, t)
    (g,) = torch.autograd.grad(l0, X)
    l0 = float(l0.detach())
    trials = []
    configs = (
        [
            (r, 0, w, p)
            for r, w, p in (
                (4, 1, 32),
                (8, 1, 16),
                (8, 1, 32),
                (16, 1, 16),
                (16, 1, 31),
                (32, 1, 16),
                (32, 4, 8),
                (64, 4, 8),
            )
        ]
        if V <= 2048
        else [
            (r, c, w, p)
            for r, c, w, p in (
                (4, 2048, 8, 4),
                (4, 1024, 4, 4),
                (4, 1024, 4, 2),
                (8, 1024, 4, 4),
                (4, 2048, 8, 2),
                (2, 4096, 16, 2),
                (2, 2048, 8, 2),
                (4, 4096, 16, 1),
                (8, 2048, 8, 2),
            )
        ]
    )
    for rows, cols, warps, per in configs:
        cfg = Launch(rows=rows, columns=cols, warps=warps, per_processor=per)
        L = torch.full((loss_partials(N, V, x, cfg),), float("nan"), device=DEV)

        def check(L=L):
            mean_loss_raw(L, counts, loss)
            return {
                "loss": abs(float(loss) - l0) / l0,
                "d": rel(d[:, :V], g),
                "pad": float(d[:, V:].float().abs().sum()),
            }

        trials.append(
            dict(
                name=f"r{rows}c{cols}w{warps}p{per}",
                run=lambda cfg=cfg, L=L: cross_entropy_raw(x, t, d, L, counts, classes=V, launch=cfg),
                check=check,
                state=lambda: [d.clone()],
                outs=[d],
                bytes=N * V * 4,
            )
        )
    trials.append(dict(name="mean", run=lambda: mean_loss_raw(L, counts, loss)))
    return trials
