"""Numbers of things in words: one row, two rows."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 row", "2 rows", "3 micro-batches"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def there_are(number: int, noun: str) -> str:
    """Returns a clause such as "there is 1 row"."""
    return f"there {'is' if number == 1 else 'are'} {counted(number, noun)}"
