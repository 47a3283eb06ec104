"""What a chat template writes around texts, without rendering it every turn.

A template is run once with *holes* in place of the strings of its messages. A hole lets itself be written, joined with other
text and trimmed, and answers questions (does it begin with ..., is it empty) with the answers of the text it stands for, which
are noted. All else that could be done with a text raises, so that nothing can depend on it unnoticed. What comes out is an
*outline*: fixed text, and the places of the holes. For other messages of the same shape that give the same answers, the
template would write the same around them.

    holes.py       holes, and what is noted of them
    template.py    a template that is run with holes
    shapes.py      messages to their shape and their texts, and back with holes
    outline.py     outlines, made, kept and filled
"""
