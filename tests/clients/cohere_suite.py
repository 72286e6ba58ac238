"""Cohere's client, version 2: rerank."""

import asyncio

import cohere
import pytest
from common import EMBEDDING_MODEL, EMBEDDING_URL, KEY, NOTED, NOTES, QUESTION


def test_documents_are_ranked():
    client = cohere.ClientV2(api_key=KEY, base_url=EMBEDDING_URL)
    ranked = client.rerank(model=EMBEDDING_MODEL, query=QUESTION, documents=NOTES)
    assert ranked.results[0].index == NOTED
    assert sorted(result.index for result in ranked.results) == list(range(len(NOTES)))
    scores = [result.relevance_score for result in ranked.results]
    assert scores == sorted(scores, reverse=True)
    assert ranked.meta is not None
    assert ranked.meta.api_version is not None
    assert ranked.meta.api_version.version == "2"
    best = client.rerank(model=EMBEDDING_MODEL, query=QUESTION, documents=[*NOTES, "water " * 4000], top_n=1)
    assert [result.index for result in best.results] == [NOTED]


def test_the_asynchronous_client_ranks_the_same():
    async def ask() -> list[int]:
        client = cohere.AsyncClientV2(api_key=KEY, base_url=EMBEDDING_URL)
        ranked = await client.rerank(model=EMBEDDING_MODEL, query=QUESTION, documents=NOTES, top_n=2)
        return [result.index for result in ranked.results]

    assert asyncio.run(ask())[0] == NOTED


def test_errors_are_those_of_the_client():
    client = cohere.ClientV2(api_key=KEY, base_url=EMBEDDING_URL)
    with pytest.raises(cohere.NotFoundError) as missing:
        client.rerank(model="nowhere", query=QUESTION, documents=NOTES)
    assert "nowhere" in missing.value.body["message"]
    with pytest.raises(cohere.BadRequestError) as refused:
        client.rerank(model=EMBEDDING_MODEL, query=QUESTION, documents=NOTES, max_tokens_per_doc=16)
    assert "max_tokens_per_doc" in refused.value.body["message"]
