import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tierspec.config import Settings, load_settings
from tierspec.errors import SettingError
from tierspec.settings.file import setting_names


def message(*overrides: str) -> str:
    with pytest.raises(SettingError) as caught:
        load_settings(None, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_defaults_are_the_papers_objective():
    objective = load_settings(None).training.objective
    assert objective.soft and objective.hard and objective.head
    assert (objective.weighting, objective.decay, objective.head_beta) == ("adaptive", 0.8, 1.0)


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_presets_load_and_survive_a_round_trip(preset, tmp_path):
    settings = load_settings(preset)
    copy = tmp_path / "copy.yaml"
    copy.write_text(settings.to_yaml())
    assert load_settings(copy) == settings


def test_every_setting_has_a_description():
    def undescribed(model, prefix=""):
        for key, field in model.model_fields.items():
            if not field.description:
                yield prefix + key
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{key}.")

    assert list(undescribed(Settings)) == []


def test_overrides_are_yaml_and_the_last_one_wins():
    settings = load_settings(
        None,
        [
            "training.depth=3",
            "training.depth=4",
            "training.learning_rate=3e-4",
            "training.objective.soft=false",
            "prompts.train=[a.jsonl, b.jsonl]",
            "run.name=7",
            "ray.address=",
        ],
    )
    assert settings.training.depth == 4
    assert settings.training.learning_rate == 3e-4
    assert settings.training.objective.soft is False
    assert settings.prompts.train == ("a.jsonl", "b.jsonl")
    assert settings.run.name == "7"
    assert settings.ray.address == ""


def test_override_gives_a_validated_copy():
    settings = load_settings(None)
    assert settings.override("training.depth=2").training.depth == 2
    assert settings.training.depth == 5
    with pytest.raises(SettingError, match=r"training\.depth"):
        settings.override("training.depth=0")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "training.lerning_rate=1",
            "unknown setting 'training.lerning_rate' (did you mean 'training.learning_rate'?)",
        ),
        ("training.slots=1", "unknown setting 'training.slots' (did you mean 'rollout.slots'?)"),
        ("qqqq.zzzz=1", "unknown setting 'qqqq'"),
        ("training.depth=five", "setting 'training.depth' is 'five': expected an integer"),
        ("training.depth=true", "setting 'training.depth' is True: expected a number"),
        ("training.depth=99", "setting 'training.depth' is 99: expected less than or equal to 32"),
        ("training.betas=[0.9]", "setting 'training.betas' is [0.9]: too few values"),
        ("training.objective=3", "setting 'training.objective' is 3: expected a group of settings"),
        ("training.weight_decay=.nan", "setting 'training.weight_decay' is nan: expected a finite number"),
        ("prompts.train=x.jsonl", "setting 'prompts.train' is 'x.jsonl': expected a list"),
        ("target.threads=45000", "setting 'target.threads' is 45000: expected less than or equal to 1024"),
        ('run.root="a\\0b"', "setting 'run.root' holds bytes that are not text"),
        ('ablation.baseline="\\ud800"', "setting 'ablation.baseline' holds bytes that are not text"),
        ("depth=3", "override 'depth=3': expected group.key=value, for example training.depth=5"),
        ("training.depth", "override 'training.depth': expected group.key=value, for example training.depth=5"),
    ],
)
def test_a_mistake_is_named_in_one_line(override, expected):
    assert message(override) == expected


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a b", "", "a\n"])
def test_run_names_are_plain(name):
    assert message(f"run.name={yaml.safe_dump(name)}").startswith("setting 'run.name' is ")


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["training.objective.soft=false", "training.objective.hard=false"], "set one of them to true"),
        (["draft.match_length=100"], "lower the first or raise the second"),
        (["decoding.max_running=4000"], "raise it to 256000 or more"),
        (["evaluation.methods=[suffix]"], "add it"),
        (["prompts.train=[]"], "name a prompt set"),
        (["target.max_context=100"], "rollout.max_new_tokens does not fit"),
    ],
)
def test_contradictions_name_the_fix(overrides, fix):
    assert fix in message(*overrides)


def test_several_mistakes_come_together():
    text = message("training.depth=0", "run.seed=-1")
    assert "training.depth" in text and "run.seed" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run:\n  name: a\n  name: b\n", "line 3: setting 'name' is given twice"),
        ("run:\n  name: [\n", "line 3: "),
        ("- a\n", "line 1: expected groups"),
        ("a: \tb\n", "line 1: "),
        ("run: {? [1] : 2}\n", "line 1: "),
    ],
)
def test_malformed_yaml_names_file_and_line(tmp_path, text, expected):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(SettingError) as caught:
        load_settings(file)
    assert f"{file}, {expected}" in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(SettingError, match=r"cannot read settings file .*nowhere\.yaml: No such file"):
        load_settings(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="not UTF-8"):
        load_settings(tmp_path / "binary.yaml")


def test_an_empty_file_or_group_means_defaults(tmp_path):
    file = tmp_path / "empty.yaml"
    for text in ("", "# nothing\n", "run:\n"):
        file.write_text(text)
        assert load_settings(file) == load_settings(None)


@settings(deadline=None)
@given(st.sampled_from(sorted(setting_names(Settings))), st.text(max_size=20))
def test_any_value_is_accepted_or_refused_in_one_line(name, value):
    try:
        loaded = load_settings(None, [f"{name}={value}"])
    except SettingError as error:
        assert "\n" not in str(error)
    else:
        assert yaml.safe_load(loaded.to_yaml())


def test_an_objective_may_be_a_published_one_by_name() -> None:
    eagle = Settings().override("training.objective=eagle3").training.objective
    assert (eagle.soft, eagle.hard, eagle.head, eagle.weighting, eagle.schedule) == (
        *(True, False, False),
        *("fixed", "geometric"),
    )
    dflash = Settings().override("training.objective=dflash", "training.objective.gamma=4").training.objective
    assert (dflash.soft, dflash.hard, dflash.head, dflash.schedule, dflash.gamma) == (
        False,
        True,
        False,
        "exponential",
        4,
    )
    assert Settings().override("training.objective=vat") == Settings()
    with pytest.raises(SettingError, match=r"training\.objective.*expected a group of settings or one of vat, eagle3"):
        Settings().override("training.objective=eagle2")
