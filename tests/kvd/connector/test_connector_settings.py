"""The connector's settings: older names, and what is said of those that mean nothing here."""

from kvd.connector.settings import read_settings


def test_older_names_are_accepted_with_a_notice_and_ours_win() -> None:
    settings = read_settings({}, {"INFERA_KVD_SOCKET": "/a", "INFERA_KVD_CHUNK_TOKENS": "512"})
    assert (settings.socket, settings.chunk_tokens) == ("/a", 512)
    assert "INFERA_KVD_SOCKET is accepted; its name here is KVD_SOCKET" in settings.notices
    both = read_settings({}, {"INFERA_KVD_SOCKET": "/a", "KVD_SOCKET": "/b"})
    assert (both.socket, both.notices) == ("/b", [])


def test_older_names_that_mean_nothing_here_are_named_with_what_to_do() -> None:
    settings = read_settings({}, {"INFERA_KVD_LONG_FSYNC": "1", "INFERA_KVD_WHATEVER": "1", "INFERA_KVD_ARENA_HUGETLB": "1"})
    assert settings.notices == [
        "INFERA_KVD_LONG_FSYNC has no meaning here: kvd serve --durability fsync",
        "INFERA_KVD_WHATEVER has no meaning here",
    ]


def test_a_variables_name_is_a_field_of_the_extra_config_too_and_wins_over_the_environment() -> None:
    environ = {"KVD_CHUNK_TOKENS": "64", "KVD_SAVE": "1"}
    settings = read_settings({"KVD_CHUNK_TOKENS": 512, "kvd_save": False, "load_threads": 3}, environ)
    assert (settings.chunk_tokens, settings.save, settings.load_threads) == (512, False, 3)


def test_an_empty_variable_names_nothing() -> None:
    settings = read_settings({}, {"KVD_SOCKET": "", "KVD_DIRECT_LIBRARY": ""})
    assert (settings.socket, settings.direct_library) == (None, None)
