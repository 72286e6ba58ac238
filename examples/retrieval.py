"""Answer a question from a few notes: embed them, search with numpy, rerank, and let a model that generates answer.

    python examples/retrieval.py --encoder sentence-transformers/all-MiniLM-L6-v2 \
        --answerer HuggingFaceTB/SmolLM2-135M-Instruct "When was the bridge built?"

Without a reranker (`--reranker BAAI/bge-reranker-v2-m3`, say) the second ranking is the encoder's own again, by
`LLM.score`: this step is a placeholder for a reranker. Without `--answerer` nothing is
answered.
"""

import argparse

import numpy as np

from penstock import LLM, SamplingParams

NOTES = [
    "The mill stands by the river. Its door is painted green, and the wheel turns from April to October.",
    "The lock keeper opens the gates at seven in the morning and closes them at nine in the evening.",
    "Bread from the mill's flour is sold on Saturdays in the market hall, next to the fountain.",
    "The bridge was built in 1871 and carries a single track of the railway.",
    "Boats longer than 24 metres must wait below the weir until the keeper waves them in.",
    "The heron that nests on the island has raised three chicks this year.",
]
CANDIDATES, USED = 3, 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a question from a few notes.")
    parser.add_argument("question")
    parser.add_argument("--encoder", required=True, help="a model that embeds")
    parser.add_argument("--reranker", help="a model that scores pairs; without it the encoder does")
    parser.add_argument("--answerer", help="a model that generates")
    options = parser.parse_args()

    with LLM(options.encoder) as encoder:
        index = encoder.embed(NOTES, normalize=True)  # [notes, vector_size]
        (query,) = encoder.embed(options.question, normalize=True)
        nearest = np.argsort(-(index @ query), kind="stable")[:CANDIDATES]
        found = [NOTES[place] for place in nearest]
        scores = encoder.score(options.question, found) if options.reranker is None else None
    if scores is None:
        with LLM(options.reranker) as reranker:
            scores = reranker.score(options.question, found)
    ranked = sorted(zip(scores, found, strict=True), reverse=True)
    for score, note in ranked:
        print(f"{score:.3f}  {note}")

    if options.answerer is not None:
        notes = " ".join(note for _, note in ranked[:USED])
        message = {"role": "user", "content": f"{notes}\n\nAnswer in one sentence: {options.question}"}
        with LLM(options.answerer, max_model_len=2048) as answerer:
            (output,) = answerer.chat([message], SamplingParams(temperature=0.0, max_tokens=48))
        print(output.outputs[0].text.strip())


if __name__ == "__main__":
    main()
