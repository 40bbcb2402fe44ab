"""The small world the chats are about: plain tables, no code."""

CAPITALS = dict(
    line.split(":")
    for line in (
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Austria:Vienna|"
        "Greece:Athens|Poland:Warsaw|Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|Ireland:Dublin|"
        "Denmark:Copenhagen|Belgium:Brussels|Hungary:Budapest|Japan:Tokyo|China:Beijing|"
        "India:New Delhi|Egypt:Cairo|Kenya:Nairobi|Canada:Ottawa|Mexico:Mexico City|Cuba:Havana|"
        "Peru:Lima|Chile:Santiago|Brazil:Brasilia|Argentina:Buenos Aires|Australia:Canberra|"
        "Turkey:Ankara|Iran:Tehran|Iraq:Baghdad|Russia:Moscow|Ukraine:Kyiv|Romania:Bucharest|"
        "Bulgaria:Sofia|Croatia:Zagreb|Iceland:Reykjavik|Thailand:Bangkok|Vietnam:Hanoi|"
        "Indonesia:Jakarta|Nepal:Kathmandu|Morocco:Rabat|Ghana:Accra|Nigeria:Abuja"
    ).split("|")
)
MONTHS = (
    "January February March April May June July August September October November December"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
COLORS = "red blue green yellow black white orange purple brown pink".split()
ANIMALS = "cat dog horse cow sheep duck mouse rabbit fox bear lion tiger frog bird fish".split()
FRUITS = "apple banana cherry grape lemon melon orange peach pear plum".split()
THINGS = "apples bananas cherries grapes lemons melons oranges pears plums cats dogs horses".split()
NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam "
    "Tina Victor"
).split()
WORDS = (
    "server token cache model table window stone river house garden paper music light water cloud "
    "bread chair train plane forest mountain bridge market school letter number circle square "
    "winter summer morning evening silver copper engine signal random simple"
).split()
UNITS = {
    "hours": ("minutes", 60),
    "minutes": ("seconds", 60),
    "days": ("hours", 24),
    "weeks": ("days", 7),
    "meters": ("centimeters", 100),
    "kilometers": ("meters", 1000),
    "kilograms": ("grams", 1000),
    "years": ("months", 12),
}
BUILTINS = {
    "len": "returns the number of items in a container",
    "sum": "adds up the items of an iterable",
    "max": "returns the largest item of an iterable",
    "min": "returns the smallest item of an iterable",
    "abs": "returns the absolute value of a number",
    "sorted": "returns a new sorted list from the items of an iterable",
    "reversed": "returns an iterator over a sequence in reverse order",
    "range": "creates a sequence of numbers",
    "zip": "joins several iterables into tuples",
    "map": "applies a function to every item of an iterable",
    "filter": "keeps the items for which a function is true",
    "enumerate": "pairs every item of an iterable with its index",
    "print": "writes text to the standard output",
    "open": "opens a file and returns a file object",
    "round": "rounds a number to a given precision",
    "any": "returns True if any item of an iterable is true",
    "all": "returns True if all items of an iterable are true",
    "int": "converts a value to an integer",
    "str": "converts a value to a string",
    "float": "converts a value to a floating point number",
    "list": "creates a list from an iterable",
    "dict": "creates a dictionary",
    "set": "creates a set of unique items",
    "tuple": "creates a tuple from an iterable",
    "type": "returns the type of an object",
    "isinstance": "checks whether an object is an instance of a class",
    "input": "reads a line of text from the user",
}
TASKS = {
    "adds two numbers": ("add", "a, b", "a + b"),
    "subtracts two numbers": ("subtract", "a, b", "a - b"),
    "multiplies two numbers": ("multiply", "a, b", "a * b"),
    "divides two numbers": ("divide", "a, b", "a / b"),
    "squares a number": ("square", "x", "x * x"),
    "doubles a number": ("double", "x", "2 * x"),
    "negates a number": ("negate", "x", "-x"),
    "checks if a number is even": ("is_even", "n", "n % 2 == 0"),
    "checks if a number is odd": ("is_odd", "n", "n % 2 == 1"),
    "checks if a number is positive": ("is_positive", "n", "n > 0"),
    "returns the larger of two numbers": ("larger", "a, b", "max(a, b)"),
    "returns the smaller of two numbers": ("smaller", "a, b", "min(a, b)"),
    "reverses a list": ("reverse", "items", "items[::-1]"),
    "reverses a string": ("reverse", "text", "text[::-1]"),
    "returns the first item of a list": ("first", "items", "items[0]"),
    "returns the last item of a list": ("last", "items", "items[-1]"),
    "returns the length of a list": ("length", "items", "len(items)"),
    "returns the sum of a list": ("total", "items", "sum(items)"),
    "returns the maximum of a list": ("maximum", "items", "max(items)"),
    "returns the minimum of a list": ("minimum", "items", "min(items)"),
    "sorts a list": ("sort", "items", "sorted(items)"),
    "joins two lists": ("join", "a, b", "a + b"),
    "converts a string to upper case": ("to_upper", "text", "text.upper()"),
    "converts a string to lower case": ("to_lower", "text", "text.lower()"),
    "removes spaces around a string": ("strip", "text", "text.strip()"),
    "splits a string into words": ("words", "text", "text.split()"),
    "counts the words of a string": ("count_words", "text", "len(text.split())"),
    "checks if a list is empty": ("is_empty", "items", "len(items) == 0"),
    "returns the average of a list": ("average", "items", "sum(items) / len(items)"),
    "removes duplicates from a list": ("unique", "items", "list(set(items))"),
}
HOW_TO = {
    "reverse a list": "items[::-1]",
    "sort a list": "sorted(items)",
    "copy a list": "items.copy()",
    "get the length of a list": "len(items)",
    "get the last item of a list": "items[-1]",
    "get the first item of a list": "items[0]",
    "sum a list": "sum(items)",
    "find the largest item of a list": "max(items)",
    "find the smallest item of a list": "min(items)",
    "remove duplicates from a list": "list(set(items))",
    "append an item to a list": "items.append(item)",
    "clear a list": "items.clear()",
    "count an item in a list": "items.count(item)",
    "reverse a string": "text[::-1]",
    "split a string": "text.split()",
    "convert a string to upper case": "text.upper()",
    "convert a string to lower case": "text.lower()",
    "convert a string to an integer": "int(text)",
    "get the keys of a dictionary": "list(table.keys())",
    "get the values of a dictionary": "list(table.values())",
}
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in full sentences.",
    "You are a Python expert.",
    "Answer briefly and correctly.",
)
