"""From a conversation to its prompt with the help of a ledger: only new text is rendered and tokenised, and what the model
generated stands in the prompt as the very ids it generated.

    cutting.py       where text may be cut without changing a token: at special tokens, proved for each tokenizer
    skeleton.py      a few short messages in place of a long history: what comes after them renders the same
    stability.py     for which templates and turns that is so, found by trying
    pieces.py        the text of a turn, span by span
    splicing.py      whether a returned answer is what was generated, and its ids in the template's frame
    matching.py      which ledger a turn goes on from
    growth.py        ids and spans that it adds
    builder.py       a ledger and a turn to a continuation
    orphans.py       blocks that a rewritten history leaves behind
    keeper.py        ledgers of sessions: found before a turn, written after it
"""
