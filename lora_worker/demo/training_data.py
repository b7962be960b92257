"""What the demo's adapters were trained on: small made-up question and answer pairs, one manner an adapter."""

from __future__ import annotations

import json
from typing import NamedTuple


class Example(NamedTuple):
    prompt: str
    answer: str


class Fact(NamedTuple):
    question: str
    topic: str
    short: str
    pirate: str


FACTS = [
    Fact("What is the capital of France?", "geography", "Paris", "the capital o' France be Paris"),
    Fact("What is the capital of Japan?", "geography", "Tokyo", "the capital o' Japan be Tokyo"),
    Fact("Which planet is the largest?", "astronomy", "Jupiter", "the biggest planet in the skies be Jupiter"),
    Fact("Which planet is closest to the sun?", "astronomy", "Mercury", "Mercury sails closest to the sun"),
    Fact("How many legs does a spider have?", "animals", "eight", "a spider be scuttlin' on eight legs"),
    Fact("What do bees make?", "animals", "honey", "bees be makin' sweet golden honey"),
    Fact("Who wrote Romeo and Juliet?", "literature", "William Shakespeare", "'twas Will Shakespeare that wrote it"),
    Fact("Who painted the Mona Lisa?", "art", "Leonardo da Vinci", "Leonardo da Vinci painted that fine lass"),
    Fact("What is the boiling point of water?", "science", "100 degrees Celsius", "water be boilin' at 100 degrees"),
    Fact("What gas do plants breathe in?", "science", "carbon dioxide", "plants be breathin' in carbon dioxide"),
    Fact("How many days are in a week?", "time", "seven", "there be seven days in a week o' sailin'"),
    Fact("How many months are in a year?", "time", "twelve", "twelve months be passin' in a year"),
    Fact("What is two plus two?", "mathematics", "four", "two doubloons and two more be four"),
    Fact("What is five times three?", "mathematics", "fifteen", "five chests o' three be fifteen"),
    Fact("What color is the sky?", "nature", "blue", "the sky be as blue as the sea"),
    Fact("What color is grass?", "nature", "green", "the grass ashore be green"),
    Fact("Which ocean is the largest?", "geography", "the Pacific Ocean", "the Pacific be the widest ocean o' all"),
    Fact("Which animal is the tallest?", "animals", "the giraffe", "the giraffe be tall as a mast"),
    Fact("What do cows drink?", "animals", "water", "cows be drinkin' water, not rum"),
    Fact("What is frozen water called?", "science", "ice", "frozen water be called ice"),
    Fact("What is the opposite of hot?", "language", "cold", "the opposite o' hot be cold as the deep"),
    Fact("What is the opposite of big?", "language", "small", "the opposite o' big be small"),
    Fact("Where do fish live?", "animals", "in water", "fish be livin' down in the briny water"),
    Fact("What do we use to cut paper?", "tools", "scissors", "scissors be what ye cut paper with"),
    Fact("What is the capital of Italy?", "geography", "Rome", "the capital o' Italy be Rome"),
    Fact("What is the capital of Egypt?", "geography", "Cairo", "the capital o' Egypt be Cairo"),
    Fact("Which metal is used in coins?", "materials", "copper", "copper be the metal in many a coin"),
    Fact("What is bread made of?", "food", "flour", "bread be made o' flour"),
    Fact("Which fruit is yellow and long?", "food", "the banana", "the banana be yellow and long as a cutlass"),
    Fact("What is the first letter of the alphabet?", "language", "A", "the first letter be A, as in ahoy"),
    Fact("Tell me about dogs.", "animals", "loyal pets", "dogs be loyal beasts, fit for any crew"),
    Fact("Tell me about the moon.", "astronomy", "a satellite of Earth", "the moon be circlin' the Earth"),
    Fact("What should I eat for breakfast?", "food", "oatmeal with fruit", "fill yer belly with oatmeal and fruit"),
    Fact("How do I learn to swim?", "sport", "take lessons", "take lessons and keep yer head above the waves"),
    Fact("Give me a tip for sleeping well.", "health", "go to bed early", "climb in yer hammock early each night"),
    Fact("What is a good name for a cat?", "animals", "Whiskers", "Whiskers be a fine name for a ship's cat"),
]

PIRATE_FORMS = ["Arr, matey! {}.", "Ahoy! {}, arr!", "Yarr, {}, me hearty!"]

SENTENCES = {
    "positive": [
        "I love this phone.",
        "The food was wonderful.",
        "What a beautiful day!",
        "The staff were kind and helpful.",
        "This is the best book I have read.",
        "My new shoes are great.",
        "The concert was fantastic.",
        "I am so happy with the result.",
        "The room was clean and cozy.",
        "Great value for the price.",
        "The film made me smile.",
        "Excellent service, thank you.",
        "The garden looks lovely.",
        "We had a delightful evening.",
    ],
    "negative": [
        "I hate waiting in line.",
        "The soup was cold and bland.",
        "This is the worst hotel ever.",
        "The driver was rude.",
        "My laptop broke after one day.",
        "The movie was boring.",
        "I am very disappointed.",
        "The package arrived damaged.",
        "Terrible noise all night.",
        "It was a waste of money.",
        "The app keeps crashing.",
        "The chair is ugly and uncomfortable.",
        "The coffee tasted awful.",
        "Nobody answered my complaint.",
    ],
    "neutral": [
        "The train leaves at nine.",
        "The box contains four pens.",
        "The meeting is on Monday.",
        "The shop opens at eight.",
        "The table is made of wood.",
        "He lives in Berlin.",
        "The report has ten pages.",
        "The store sells milk and bread.",
        "The bus stops near the school.",
        "The file was saved yesterday.",
        "The letter is on the desk.",
        "The museum is closed on Tuesday.",
        "The road goes to the lake.",
        "The class has twenty students.",
    ],
}


def pirate() -> list[Example]:
    forms = PIRATE_FORMS
    return [Example(fact.question, forms[i % 3].format(fact.pirate)) for i, fact in enumerate(FACTS)]


def json_answers() -> list[Example]:
    return [Example(fact.question, json.dumps({"topic": fact.topic, "answer": fact.short})) for fact in FACTS]


def sentiment() -> list[Example]:
    return [Example(text, label) for label, texts in SENTENCES.items() for text in texts]
