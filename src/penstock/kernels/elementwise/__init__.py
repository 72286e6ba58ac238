"""Operations on single rows: gather, scale, sums, gates, root-mean-square normalisation."""
