"""Settings for checking the notebooks' stored outputs with nbval."""


def pytest_collection_modifyitems(items):
    """Give outputs a minute to arrive: nbval's 5 seconds have no option and run out on a busy machine."""
    for item in items:
        item.output_timeout = 60
