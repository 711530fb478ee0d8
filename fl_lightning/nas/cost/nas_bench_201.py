"""Closed forms of what cells of NAS-Bench-201 cost, in its own and in NASLib's counting.

With n₁, n₃ and n_p the cell's 1×1, 3×3 and pool edges, C = 16, 32, 64 and S the side of a stage:

    params = 464 + Σ_stages 5(n₁(C² + 2C) + n₃(9C² + 2C)) + Σ_reductions (9cC + 10C² - ...) ...
"""
