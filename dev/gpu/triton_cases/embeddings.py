"""Embeddings and the gradients of their tables. Each function returns trials: see triton_gpu.py."""

from triton_cases import DEV, rand, rel, state


def gather(B, T, V, C):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.embedding.reference import embedding_reference
    from ridgeline.ops.embedding.triton import gather_raw

    st, dropped = state(), V == 65
    ids, w, pos = torch.randint(0, V, (B, T), device=DEV), rand(V, C), rand(T, C)
    out = torch.full((B * T, C), float("nan"), device=DEV, dtype=torch.bfloat16)
    extra = dict(p=0.2, dropout=st, site=3) if dropped else {}
    ref = embedding_reference(ids, w.float(), pos.float(), **extra)
    trials = []
    for rows, warps in ((1, 1), (2, 1), (4, 4), (8, 4), (16, 4)):
        cfg = Launch(rows=rows, warps=warps)
        trials.append(
            dict(
                name=f"r{rows}w{warps}",
                run=lambda cfg=cfg: gather_raw(ids.view(-1, 1), w, out, positions_RC=pos, T=T, config=cfg, **extra),
                check=lambda: {"out": rel(out, ref)},
                state=lambda: [out.clone()],
                outs=[out],
                bytes=B * T * (C * 2 + 8),
            )
        )
    trials.append(dict(name="torch (no dropout)", run=lambda: torch.nn.functional.embedding(ids, w) + pos))
    return trials


def dtable(N, K, V, C, small):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.embedding.sorted import table_gradient_sorted_raw
    from ridgeline.ops.embedding.triton import small_partials, table_gradient_small_raw

    ids = (torch.rand(N, K, device=DEV) ** 3 * V).long()
    d = rand(N, K * C)
    ref = torch.zeros(V, C, device=DEV, dtype=torch.float64).index_add_(0, ids.flatten(), d.view(-1, C).double())
    dt = torch.zeros(V, C, device=DEV)
    trials = []
    if small:
        for rows, cols, warps, per in (
            (64, 64, 4, 1),
            (64, 64, 4, 2),
            (64, 32, 4, 2),
            (128, 64, 4, 1),
            (128, 128, 8, 1),
            (32, 64, 4, 2),
        ):
            cfg = Launch(rows=rows, columns=min(cols, max(16, C)), warps=warps, per_processor=per)
            parts = torch.empty(small_partials(N * K, V, C, d, cfg), V * C, device=DEV)
            trials.append(
                dict(
                    name=f"r{rows}c{cols}w{warps}p{per}",
                    run=lambda cfg=cfg, parts=parts: table_gradient_small_raw(
                        d, ids, dt, parts, accumulate=False, config=cfg
                    ),
                    check=lambda: {"dt": rel(dt, ref)},
                    state=lambda: [dt.clone()],
                    outs=[dt],
                    bytes=N * K * C * 2,
                    limit=1e-5,
                )
            )
    else:
        ends = torch.empty(-(-N * K // 64), 2, C, device=DEV)

        def run(columns, warps):
            dt.zero_()
            table_gradient_sorted_raw(d, ids, dt, ends, config=Launch(rows=64, warps=warps, columns=columns))

        for columns, warps in ((64, 4), (64, 8), (128, 8), (256, 8)):
            trials.append(
                dict(
                    name=f"c{columns}w{warps} (+zero)",
                    run=lambda launch=(columns, warps): run(*launch),
                    check=lambda: {"dt": rel(dt, ref)},
                    state=lambda: [dt.clone()],
                    outs=[dt],
                    bytes=N * K * C * 2,
                    limit=1e-5,
                )
            )
        trials.append(dict(name="torch sort alone", run=lambda: torch.sort(ids.flatten(), stable=True)))
        trials.append(dict(name="torch zero alone", run=lambda: dt.zero_()))
    trials.append(
        dict(name="torch", run=lambda: torch.ops.aten.embedding_dense_backward(d.view(N, K, C), ids, V, -1, False))
    )
    return trials


def dpos(B, T, C):
    import torch

    from ridgeline.ops.embedding.triton import position_gradient_raw

    d, out = rand(B, T, C), torch.zeros(T, C, device=DEV)
    return [
        dict(
            name="sums",
            run=lambda: position_gradient_raw(d, out, accumulate=False),
            check=lambda: {"dp": rel(out, d.double().sum(0))},
            state=lambda: [out.clone()],
            outs=[out],
            bytes=B * T * C * 2,
            limit=1e-5,
        ),
        dict(name="torch", run=lambda: d.sum(0)),
    ]
