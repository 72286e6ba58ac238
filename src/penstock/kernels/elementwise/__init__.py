"""Operations on single rows: gather, scale, the gated activation, root-mean-square normalisation."""
