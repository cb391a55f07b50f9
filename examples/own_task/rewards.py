"""A reward of one's own. Its parameters are the completion and any columns of the data."""


def short_and_on_topic(completion: str, answer: str, most: int) -> float:
    """Half of it for the word that was asked for, half for being short. An empty answer gets nothing."""
    words = [word.strip(".,;:!?\"'").lower() for word in completion.split()]
    return 0.5 * (answer in words) + 0.5 * (0 < len(words) <= most)
