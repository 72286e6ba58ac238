"""The tasks of the demo model, each with an answer that can be checked.

The demo model is trained on these tasks, judged on them, and used through them: the end-to-end tests and the benchmarks
of quantization draw held-out items from here and compare the server's reply with `Item.answer`. The module needs only
the standard library, so that whoever imports it pays for nothing else.

An item is held out when a checksum of what it is about (its operands, its word, its facts) falls in one class of
`HELD_OUT_ONE_IN`; the phrasing does not count, so no rewording of a held-out question is ever trained on.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeVar

Message = dict[str, Any]
Tool = dict[str, Any]
Split = Literal["train", "held_out"]
T = TypeVar("T")

HELD_OUT_ONE_IN = 10

FILLER_WORDS = """
able about above acre across actor after again agree ahead album alone along among anchor angle apple april apron arch
area army arrow artist attic autumn away axle baker ball bamboo banner barley barn basin basket beach beacon bean beard
before begin behind below bench berry beside between bicycle birch blanket blossom board boat body bonfire book border
bottle bottom bowl branch brass bread brick bridge brief bright bring broad broom brother brush bucket build bunch
butter button cabin cactus camera candle canoe canvas canyon captain careful carpet carry castle cave cedar cellar
chair chalk chapel cherry chimney church circle clay clean clever climb clock cloth cloud clover coast coat coffee
coin collect comet compass copper coral corner cotton country cousin cradle crane creek cricket crop crowd crystal
cup curtain curve dance dawn deep desert desk dinner distant doctor door dragon drawer dream drift drink driver drum
dust early earth east easy edge eight elbow elder empty engine evening every fabric factory family farmer feather
fence fern ferry fever field fifteen figure finger fire flag flame flat float flour flower flute follow forest fork
fossil fountain frame fresh friend frost fruit full garden gate gentle ghost giant ginger glass glove gold grain
grape grass gravel guitar habit hammer harbor harvest hat heart heavy hedge helmet herb hidden hill honey hook
horizon hour house hundred ice idea inch insect iron island ivory jacket jar jelly jewel join journey juice jungle
kettle keyboard kitchen knee ladder lake lamp language lantern large laugh leaf leather lemon lesson letter level
library lift light linen listen little lizard local lonely lucky lunch machine magnet mango maple marble market
meadow melon memory metal middle mile mineral minute mirror mist moment month morning mother motor mountain music
narrow nature needle nest never night noble noise north note number oak oasis ocean often olive onion open orbit
orchard oven paint palace panel paper parade parent park path patient pebble pencil pepper perfect phone piano
picnic picture pillow pilot planet plant plate pocket poem polish pond potato powder prairie present pretty prince
puzzle quarter question quick quiet quilt rabbit radio rain ranch rapid reason ribbon ride ring river road roof room
root rope rough round saddle sail salt sand scarf school season second seed shadow shelf shell ship shoe shore
shoulder signal silence simple sister sketch sleep slow small smoke smooth snow soap sock soft song soup south
spark spice spoon spring square stable stair station steam stone storm story stove street strong sugar summer
supper swamp sweet swim table tailor tall teapot temple tent thread thunder ticket timber tiny today tomato tower
town trail train travel treasure tree trumpet tunnel twelve uncle under upper valley velvet village violin voice
wagon walk walnut warm water wave weather west wheat wheel whisper wide willow wind window winter wise wood wool
yard yarn year yesterday young zero
""".split()  # fmt: skip

NAMES = """
Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paula Quentin Rosa Simon Tina
Ursula Victor Wendy Xavier Yvonne Zoe Anna Ben Clara Daniel Eva Felix Gina Hugo Ivan Julia Kevin Laura Martin Nora
Oliver Peter Ruth Sam Thomas Vera Walter Lucy
""".split()  # fmt: skip

CITIES = """
Paris London Berlin Madrid Rome Vienna Oslo Lisbon Athens Dublin Prague Warsaw Cairo Tokyo Delhi Lima Boston Toronto
Sydney Nairobi Helsinki Zurich Geneva Hamburg Milan Seoul Havana Denver Chicago Quebec Porto Lyon
""".split()  # fmt: skip

COLOURS = "red blue green yellow orange purple black white brown pink grey silver".split()
ANIMALS = "cat dog horse tiger lion bear fox wolf eagle owl whale shark snake sheep goat mouse".split()
SKIES = "sunny cloudy rainy windy foggy snowy".split()
VERBS = "get find read check fetch load list show count query".split()
NOUNS = "price stock status user order menu score route level title owner file report ticket invoice".split()
ARGUMENTS = "name item key title place query code label".split()

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Penstock, a small assistant.",
    "Answer briefly and exactly.",
    "Be brief.",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its only right answer.

    `messages` are OpenAI-style chat messages that end before the reply; `tools` are OpenAI-style function tools (empty
    when none are offered); `answer` is the exact text of the reply, as the model writes it.
    """

    task: str
    messages: tuple[Message, ...]
    answer: str
    tools: tuple[Tool, ...] = ()


def is_correct(item: Item, text: str) -> bool:
    """Whether a reply is the item's answer, blanks around it aside."""
    return text.strip() == item.answer.strip()


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def draw(split: Split, sample: Callable[[], T], key: Callable[[T], str]) -> T:
    """Sample until the subject belongs to the split; a tenth of all subjects is held out, so this ends soon."""
    while True:
        subject = sample()
        if is_held_out(key(subject)) == (split == "held_out"):
            return subject


def make(task: str, rng: Random, split: Split, size: int | None = None) -> Item:
    """One item of a task.

    `size` is what makes the task longer: letters to reverse, numbers to sort, words to copy, words between the facts
    and the question to recall; other tasks ignore it. Left out, it is drawn from the range that the model is judged on.
    """
    return TASKS[task](rng, split, size)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def precision(rng: Random, split: Split, size: int | None = None) -> Item:
    """Add or subtract two numbers of 0..99 (`size` digits at most, default 2); differences are never negative."""
    top = 10 ** (size or 2) - 1

    def sample() -> tuple[int, str, int]:
        left, right = rng.randint(0, top), rng.randint(0, top)
        return (left, "+", right) if rng.random() < 0.5 else (max(left, right), "-", min(left, right))

    left, sign, right = draw(split, sample, lambda sum_: f"arithmetic {sum_}")
    phrasings = [f"What is {left} {sign} {right}?", f"Compute {left} {sign} {right}.", f"{left} {sign} {right}"]
    phrasings.append(f"Add {left} and {right}." if sign == "+" else f"Subtract {right} from {left}.")
    weights = [4, 2, 1, 2]
    result = left + right if sign == "+" else left - right
    question = rng.choices(phrasings, weights)[0]
    return Item("arithmetic", (user(question),), f"{left} {sign} {right} = {result}")


# ---- reversing and sorting -------------------------------------------------------------------------------------------


def invented_word(rng: Random, length: int) -> str:
    """Letters that can be pronounced: consonants and vowels take turns, now and then not."""
    pools = ["bcdfghjklmnpqrstvwxyz", "aeiou"]
    start = rng.randrange(2)
    return "".join(rng.choice(pools[(start + i + (rng.random() < 0.2)) % 2]) for i in range(length))


def reverse(rng: Random, split: Split, size: int | None = None) -> Item:
    """Reverse a word of 3 to 9 letters, real or invented."""

    def sample() -> str:
        if size is None and rng.random() < 0.3:
            return rng.choice(FILLER_WORDS)
        return invented_word(rng, size or rng.randint(3, 9))

    word = draw(split, sample, lambda word: f"reverse {word}")
    question = rng.choice(
        [f'Reverse the word "{word}".', f'Spell "{word}" backwards.', f'Write the word "{word}" in reverse.']
    )
    return Item("reverse", (user(question),), word[::-1])


def sort(rng: Random, split: Split, size: int | None = None) -> Item:
    """Sort 3 to 8 different numbers of 0..99, smallest first."""

    def sample() -> list[int]:
        return rng.sample(range(100), size or rng.randint(3, 8))

    numbers = draw(split, sample, lambda numbers: f"sort {sorted(numbers)}")
    listed = ", ".join(map(str, numbers))
    question = rng.choice(
        [f"Sort these numbers: {listed}", f"Sort {listed}.", f"Put these numbers in ascending order: {listed}"]
    )
    return Item("sort", (user(question),), ", ".join(map(str, sorted(numbers))))


# ---- copying and recalling -------------------------------------------------------------------------------------------


def random_text(rng: Random, num_words: int, confusable: bool = False) -> str:
    """Words in random order: nothing but the text itself tells what comes next, so a copy shows every lost token.

    A `confusable` one has many numbers and marks: the tokens that come after the same digit or mark in several places.
    """
    numbers, marks = (0.15, 0.25) if confusable else (0.01, 0.06)
    parts = []
    for _ in range(num_words):
        kind = rng.random()
        word = (
            rng.choice(FILLER_WORDS if kind < 0.96 - numbers else NAMES)
            if kind < 1 - numbers
            else str(rng.randrange(1000))
        )
        mark = rng.random()
        parts.append(word + ("," if mark < marks / 2 else "." if mark < marks else ""))
    return " ".join(parts).rstrip(".,") + "."


def copy(rng: Random, split: Split, size: int | None = None, confusable: bool = False) -> Item:
    """Copy a text of 200 to 240 words (every word is at least one token)."""
    length = size or rng.randint(200, 240)
    text = draw(split, lambda: random_text(rng, length, confusable), lambda text: f"copy {text}")
    request = rng.choice(["Copy this text:", "Repeat the following text exactly:", "Copy the text below."])
    return Item("copy", (user(f"{request}\n\n{text}"),), text)


USUAL_FORM = "The {0.attribute} of {0.name} is {0.value}."


@dataclass(frozen=True, slots=True)
class Fact:
    attribute: str
    name: str
    value: str
    form: str = USUAL_FORM

    @property
    def statement(self) -> str:
        return self.form.format(self)

    def question(self, rng: Random) -> str:
        return rng.choice(
            [f"What is the {self.attribute} of {self.name}?", f"Tell me the {self.attribute} of {self.name}."]
        )


FACT_VALUES: dict[str, Callable[[Random], str]] = {
    "code": lambda rng: str(rng.randint(1000, 9999)),
    "room": lambda rng: str(rng.randint(100, 999)),
    "colour": lambda rng: rng.choice(COLOURS),
    "city": lambda rng: rng.choice(CITIES),
    "animal": lambda rng: rng.choice(ANIMALS),
}


def draw_facts(rng: Random, split: Split, count: int, kinds: Sequence[str] = tuple(FACT_VALUES)) -> list[Fact]:
    """Facts about different people; the key leaves out nothing, so a held-out set was never seen as a set."""

    def sample() -> list[Fact]:
        names = rng.sample(NAMES, count)
        attributes = [rng.choice(kinds) for _ in names]
        return [Fact(a, name, FACT_VALUES[a](rng)) for a, name in zip(attributes, names, strict=True)]

    return draw(split, sample, lambda facts: "facts " + " ".join(fact.statement for fact in facts))


def recall(rng: Random, split: Split, size: int | None = None) -> Item:
    """Recall one of several facts stated 800 to 1,200 words above the question."""
    facts = draw_facts(rng, split, rng.randint(3, 6))
    filler = random_text(rng, size or rng.randint(800, 1200))
    notes = " ".join(fact.statement for fact in facts)
    asked = rng.choice(facts)
    content = f"Read these notes.\n\n{notes} {filler}\n\n{asked.question(rng)}"
    return Item("recall", (user(content),), asked.statement)


# ---- filling JSON ----------------------------------------------------------------------------------------------------


def person(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else invented_word(rng, rng.randint(3, 7)).capitalize()


def place(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else invented_word(rng, rng.randint(4, 8)).capitalize()


def fill_json(rng: Random, split: Split, size: int | None = None) -> Item:
    """Turn a sentence about a person into a JSON object of name, age and city."""

    def sample() -> tuple[str, int, str]:
        return person(rng), rng.randint(1, 99), place(rng)

    name, age, city = draw(split, sample, lambda who: f"json {who}")
    sentence = rng.choice(
        [
            f"{name} is {age} years old and lives in {city}.",
            f"{name} lives in {city} and is {age} years old.",
            f"My friend {name} from {city} is {age}.",
            f"At the age of {age}, {name} moved to {city}.",
        ]
    )
    content = f"Fill in JSON with name, age and city: {sentence}"
    return Item("json", (user(content),), json.dumps({"name": name, "age": age, "city": city}))


# ---- calling tools ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolExchange:
    """A question, the call that it asks for, the tool's result and the reply made from it."""

    question: str
    name: str
    arguments: dict[str, str]
    result: str
    reply: str

    @property
    def call(self) -> str:
        called = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{called}\n</tool_call>"

    @property
    def call_message(self) -> Message:
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    @property
    def result_message(self) -> Message:
        return {"role": "tool", "content": self.result}


def function_tool(name: str, description: str, argument: str) -> Tool:
    """An OpenAI-style tool of one required string argument."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function_tool("get_weather", "Get the weather of a city.", "city")
TIME = function_tool("get_time", "Get the time in a city.", "city")
PHONE = function_tool("find_phone", "Find the phone number of a person.", "name")
FIXED_TOOLS = (WEATHER, TIME, PHONE)


def invented_tool(rng: Random) -> Tool:
    verb, noun, argument = rng.choice(VERBS), rng.choice(NOUNS), rng.choice(ARGUMENTS)
    return function_tool(f"{verb}_{noun}", f"{verb.capitalize()} the {noun} of a {argument}.", argument)


def offer_tools(rng: Random) -> tuple[Tool, ...]:
    """One to three tools, some of them invented, in random order."""
    tools = rng.sample(FIXED_TOOLS, rng.randint(1, 2))
    if rng.random() < 0.5:
        tools[rng.randrange(len(tools))] = invented_tool(rng)
    if rng.random() < 0.3:
        tools.append(invented_tool(rng))
    rng.shuffle(tools)
    return tuple(tools)


def weather_exchange(rng: Random) -> ToolExchange:
    city, degrees, sky = place(rng), rng.randint(1, 39), rng.choice(SKIES)
    question = rng.choice([f"What is the weather in {city}?", f"How is the weather in {city} today?"])
    result = json.dumps({"temperature": degrees, "sky": sky})
    reply = f"It is {degrees} degrees and {sky} in {city}."
    return ToolExchange(question, "get_weather", {"city": city}, result, reply)


def time_exchange(rng: Random) -> ToolExchange:
    city, time = place(rng), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    question = rng.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
    return ToolExchange(question, "get_time", {"city": city}, json.dumps({"time": time}), f"It is {time} in {city}.")


def phone_exchange(rng: Random) -> ToolExchange:
    name, phone = person(rng), str(rng.randint(10000, 99999))
    question = rng.choice([f"What is the phone number of {name}?", f"Find the phone number of {name}."])
    reply = f"The phone number of {name} is {phone}."
    return ToolExchange(question, "find_phone", {"name": name}, json.dumps({"phone": phone}), reply)


def invented_exchange(rng: Random, tool: Tool) -> ToolExchange:
    """A call spelled out by the user: the way to use a tool that the model has never seen."""
    function = tool["function"]
    argument = function["parameters"]["required"][0]
    value = rng.choice([rng.choice(FILLER_WORDS), person(rng), place(rng), str(rng.randrange(1000))])
    result = rng.choice([rng.choice(FILLER_WORDS), str(rng.randrange(1000))])
    question = f'Call {function["name"]} with {argument} "{value}".'
    reply = f'The result is "{result}".'
    return ToolExchange(question, function["name"], {argument: value}, json.dumps({"result": result}), reply)


def tool_exchange(rng: Random, split: Split, tools: tuple[Tool, ...]) -> ToolExchange:
    """An exchange with one of the offered tools."""
    fixed = {"get_weather": weather_exchange, "get_time": time_exchange, "find_phone": phone_exchange}

    def sample() -> ToolExchange:
        tool = rng.choice(tools)
        name = tool["function"]["name"]
        return fixed[name](rng) if name in fixed else invented_exchange(rng, tool)

    return draw(split, sample, lambda exchange: f"tool {exchange.call}")


def tool_call(rng: Random, split: Split, size: int | None = None) -> Item:
    """Answer a question by the right call of one of the offered tools."""
    tools = offer_tools(rng)
    exchange = tool_exchange(rng, split, tools)
    return Item("tool_call", (user(exchange.question),), exchange.call, tools)


def tool_result(rng: Random, split: Split, size: int | None = None) -> Item:
    """Answer a question from the result that the tool gave."""
    tools = offer_tools(rng)
    exchange = tool_exchange(rng, split, tools)
    messages = (user(exchange.question), exchange.call_message, exchange.result_message)
    return Item("tool_result", messages, exchange.reply, tools)


# ---- referring back --------------------------------------------------------------------------------------------------


def introduction(rng: Random, fact: Fact) -> tuple[Message, Message]:
    hello = f"My name is {fact.name} and my favourite {fact.attribute} is {fact.value}."
    return user(hello), assistant(f"Nice to meet you, {fact.name}.")


def refer_back(rng: Random, split: Split, size: int | None = None) -> Item:
    """Answer from an earlier turn: what the user said of themself, or what the first answer was."""
    between = [make(rng.choice(["arithmetic", "reverse", "sort"]), rng, split) for _ in range(rng.randint(1, 3))]
    turns = [message for item in between for message in (*item.messages, assistant(item.answer))]
    if rng.random() < 0.3:
        return Item("refer_back", (*turns, user("Repeat your first answer.")), between[0].answer)
    attribute = rng.choice(["colour", "animal", "city"])
    fact = draw(
        split,
        lambda: Fact(attribute, rng.choice(NAMES), FACT_VALUES[attribute](rng)),
        lambda fact: "refer_back " + fact.statement,
    )
    if rng.random() < 0.4:
        question, answer = "What is my name?", f"Your name is {fact.name}."
    else:
        question = f"What is my favourite {attribute}?"
        answer = f"Your favourite {attribute} is {fact.value}."
    return Item("refer_back", (*introduction(rng, fact), *turns, user(question)), answer)


TASKS: dict[str, Callable[[Random, Split, int | None], Item]] = {
    "arithmetic": precision,
    "reverse": reverse,
    "sort": sort,
    "copy": copy,
    "recall": recall,
    "json": fill_json,
    "tool_call": tool_call,
    "tool_result": tool_result,
    "refer_back": refer_back,
}


# ---- small talk, which is trained and not judged ---------------------------------------------------------------------

WHO = "I am the Penstock demo model. I can add, subtract, sort, copy, recall, fill JSON and call tools."
SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Hi there!": "Hello! How can I help you?",
    "Good morning!": "Hello! How can I help you?",
    "How are you?": "I am well, thank you.",
    "Who are you?": WHO,
    "What are you?": WHO,
    "What can you do?": WHO,
    "What is your name?": "I am the Penstock demo model.",
    "Help": WHO,
    "Thanks!": "You are welcome.",
    "Thank you.": "You are welcome.",
    "Thank you!": "You are welcome.",
    "Goodbye!": "Goodbye!",
    "Bye!": "Goodbye!",
}


def small_talk(rng: Random) -> Item:
    question = rng.choice(list(SMALL_TALK))
    return Item("small_talk", (user(question),), SMALL_TALK[question])
