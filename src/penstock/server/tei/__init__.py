"""TEI's dialect: embeddings, reranking, tokens."""
