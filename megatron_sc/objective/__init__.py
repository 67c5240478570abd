"""The mathematics: importance weights, the sampler's distribution, coefficients, advantages."""
