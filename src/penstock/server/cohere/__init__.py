"""Cohere's dialect: reranking."""
