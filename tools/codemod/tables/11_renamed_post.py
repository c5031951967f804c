import sys,shutil
from pathlib import Path
R=Path(sys.argv[1])
def edit(p,*pairs):
    f=R/p; s=f.read_text()
    for a,b in pairs:
        if a not in s: print('POST MISSING',p,repr(a[:70])); continue
        s=s.replace(a,b,1)
    f.write_text(s)
for n in ('renamed.py','renamed.yaml'): shutil.copy(Path(__file__).resolve().parents[1]/n,R/'megalith/config'/n)
edit('megalith/config/fields.py',('''from megalith.config.suggest import did_you_mean
''','''from megalith.config.renamed import successor_of_setting
from megalith.config.suggest import did_you_mean
'''),('''    advice = did_you_mean(path, [*hints_of(cls), *setting_names(cls)])
    if not advice:''','''    given = path if value is None else f"{path}={value}"
    successor = successor_of_setting(path)
    if successor is not None and hint_at(cls, successor) is not None:
        return f"{given}: this setting was renamed. Use {successor}."
    advice = did_you_mean(path, [*hints_of(cls), *setting_names(cls)])
    if not advice:'''),('''    return f"{path}{'' if value is None else f'={value}'}: there is no such setting.{advice}"''','''    return f"{given}: there is no such setting.{advice}"'''))
edit('megalith/config/tree.py',('''from megalith.config.suggest import did_you_mean
''','''from megalith.config.renamed import successor_of_value, translate_stored_settings
from megalith.config.suggest import did_you_mean
'''),('''def load_yaml(path: str | Path, cls: type[T]) -> T:
    """Read a tree of type `cls` from a YAML file.
''','''def load_yaml(path: str | Path, cls: type[T], *, stored: bool = False) -> T:
    """Read a tree of type `cls` from a YAML file.

    `stored`: the file was written by a run, perhaps of an older version, so settings that were renamed are translated.
    In a user's file they are errors that name the successor.
'''),('''        return _build(cls, data, problems)
    except ConfigError as error:''','''        return _build(cls, translate_stored_settings(data) if stored else data, problems)
    except ConfigError as error:'''),('''    if value is None and type(None) in options_of(hint):
        return None
''','''    if value is None and type(None) in options_of(hint):
        return None
    successor = successor_of_value(path, value)
    if successor is not None:
        return report.renamed(path, value, successor)
'''),('''    def mismatch(self, path: str, hint: Hint, value: Plain) -> None:''','''    def renamed(self, path: str, value: Plain, successor: str) -> None:
        """Note a value that has another name now."""
        self.problems.append(f"{path}={value}: this value was renamed. Use {path}={successor}.")

    def mismatch(self, path: str, hint: Hint, value: Plain) -> None:'''))
edit('megalith/recipes/__init__.py',('load_yaml(path / "config.yaml", TrainRun)','load_yaml(path / "config.yaml", TrainRun, stored=True)'))
edit('megalith/train/folder.py',('load_yaml(folder.config, TrainRun)','load_yaml(folder.config, TrainRun, stored=True)'))
edit('megalith/models/pretrained.py',("raw = yaml.safe_load(storage.read_bytes(file)) if file.is_file() else None","raw = translate_stored_settings(yaml.safe_load(storage.read_bytes(file))) if file.is_file() else None"),("raw = yaml.safe_load(checkpoint.config_text)\n","raw = translate_stored_settings(yaml.safe_load(checkpoint.config_text))\n"),("from megalith.config.tokenizer import","from megalith.config.renamed import translate_stored_settings\nfrom megalith.config.tokenizer import"))
edit('megalith/models/adapters.py',('from_dict(LoraConfig, yaml.safe_load(checkpoint.config_text)["lora"])','from_dict(LoraConfig, translate_stored_settings(yaml.safe_load(checkpoint.config_text))["lora"])'),("from megalith.config.tree import","from megalith.config.renamed import translate_stored_settings\nfrom megalith.config.tree import"))
