"""That the benchmarks work, that their page says what was measured, and what a change may cost, by counts."""
