from array import array

from penstock.api.request import Request
from penstock.api.sampling_params import Structured
from penstock.core.sequence import Sequence
from penstock.structured.jump_ahead import JumpAhead
from penstock.structured.masks import Grammars
from tests.structured.test_masks import PROMPT, batch

FORM = Structured.choice(["certainly, with pleasure", "no"])


def make(vocabulary):
    grammars = Grammars(lambda: vocabulary, vocabulary.size, max_num_seqs=4)
    samples = batch((0, FORM, []))
    grammars.begin(samples).result()
    seq = Sequence(Request("a", tuple(PROMPT), samples.sequences[0].params, arrival=0.0), 0, 0)
    return grammars, seq


def test_the_rest_of_what_was_begun_is_guessed(vocabulary, tokenizer):
    grammars, seq = make(vocabulary)
    drafter = JumpAhead(grammars)
    assert drafter.propose([(seq, 9)])[0] == array("i")  # either may come
    tokens = tokenizer.encode("certainly, with pleasure", add_special_tokens=False)
    seq.tokens.extend(tokens[:1])
    (draft,) = drafter.propose([(seq, 99)])
    assert "certainly, with pleasure".startswith(tokenizer.decode([*tokens[:1], *draft]))
    assert len(draft) > 2
    assert len(drafter.propose([(seq, 2)])[0]) == 2
    grammars.close()


def test_without_a_form_or_a_first_mask_nothing_is_guessed(vocabulary):
    grammars, seq = make(vocabulary)
    drafter = JumpAhead(grammars)
    drafter.forget_sequence(seq)
    assert drafter.propose([(seq, 9)])[0] == array("i")
    plain = Sequence(Request("b", tuple(PROMPT), batch((1, None, [])).sequences[0].params, arrival=0.0), 0, 1)
    assert drafter.propose([(plain, 9)])[0] == array("i")
    grammars.close()
