"""The meanings of the page's words: they show when a reader points at a word, or tabs to it."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

WORDS = {
    "accuracy": "The share of examples whose label the model gets right.",
    "at the end": "The loss of this example when the training ended.",
    "deviation": "How far the model's prediction for this example would move if the model had been "
    "trained without it.",
    "error": "How wrong the model is about this example: the length of prediction minus label.",
    "kind": "What looks wrong: label (probably a wrong label), unfamiliar (unlike the others), "
    "duplicate (there twice).",
    "leave-one-out estimate": "The loss on new data, from the training data alone: each example is "
    "predicted as if the model had never seen it.",
    "left-out loss": "The loss of this example if the model had been trained without it.",
    "left-out prediction": "What the model would say of this example if it had been trained "
    "without it.",
    "leverage": "How far this example decides its own prediction: 0 not at all, 1 alone.",
    "likely range": "Where the number probably lies.",
    "loss": "How badly an example is predicted: 0 is perfect, and larger is worse.",
    "perplexity": "Among how many equally likely next tokens the model seems to choose.",
    "prediction": "What the trained model says of this example.",
    "proposed": "The label that fits best among the others.",
    "rank": "1 is the example that looks most wrong.",
    "region": "The part of the memory map in which the example lies.",
    "self influence": "How far the loss of this example would rise if the model had been trained "
    "without it.",
    "squared error": "The square of the distance between prediction and target: 0 is perfect.",
    "typical error": "The root of the mean squared error, in the units of the target.",
    "target": "The label in your data.",
    "variance": "How free the model is to change its prediction for this example.",
    "memorable": "The model is wrong here and nothing supports the example: it is learned by "
    "heart.",
    "regular": "The model is right here, and other examples support it.",
    "uncertain": "The model is right here, but few examples support it.",
    "unpredictable": "The model is wrong here, because the other examples insist.",
    "label is wrong": "How likely it is that the label is wrong.",
}
_LONGEST_FIRST = sorted(WORDS, key=len, reverse=True)
_PATTERN = re.compile(rf"\b({'|'.join(_LONGEST_FIRST)})\b")


def explained(text: str) -> Markup:
    """The text as HTML, in which the first occurrence of each word has its meaning.

    >>> explained("<b> kind").striptags()
    '<b> kind'
    """
    explained_words: set[str] = set()

    def replacement(match: re.Match[str]) -> str:
        word = match.group()
        if word in explained_words:
            return word
        explained_words.add(word)
        return f'<abbr tabindex="0" title="{escape(WORDS[word])}">{word}</abbr>'

    return Markup(_PATTERN.sub(replacement, str(escape(text))))
