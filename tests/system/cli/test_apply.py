"""`pawl apply` and `pawl export` with every kind of resource, against a running suite."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.system.cli.conftest import CommandLine

SHOP = {
    "pawl.yaml": "name: shop\n",
    "agents/clerk.yaml": "name: clerk\ndelegates_to: [till]\n---\nname: till\ntools: {names: [calculate]}\n",
    "rules/ask.yaml": "name: ask-till\neffect: ASK\nscope: AGENT\nscope_id: till\ntool_name: calculate\n",
    "schedules/daily.yaml": "name: daily\ntext: report\nagent: clerk\ncron: '0 9 * * *'\n",
    "triggers/order.yaml": "name: order\ntext: handle {{event}}\nagent: clerk\nwebhook: {}\n",
    "settings/store.yaml": "layer: STORE\nlimits: {active_runs_per_user: 3}\n",
    "channels/hook.yaml": "name: hook\nurl: https://hooks.example\n",
    "sources/stock.yaml": "name: stock\nhttp_endpoint:\n  url: https://stock.example/{item}\n  method: GET\n"
    "  description: Look up an item.\n  arguments_schema:\n    type: object\n    properties: {item: {type: string}}\n"
    "    required: [item]\n  secret_headers: {authorization: stock-token}\n",
}


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _listed(pawl: CommandLine, folder: Path) -> dict[str, str]:
    """Return all resources, as `pawl export` writes them to a new folder."""
    pawl.succeed("export", str(folder))
    return {str(path.relative_to(folder)): path.read_text() for path in folder.glob("*/*.yaml")}


def test_a_set_with_all_kinds_can_be_applied_exported_adopted_and_pruned(pawl: CommandLine, tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    _write(shop, SHOP)
    pawl.until(lambda agents: "greeter" in agents, "agents", "list")  # PAWL_APPLY is done.
    before = _listed(pawl, tmp_path / "before")
    bad = shop / "schedules" / "bad.yaml"
    bad.write_text("name: bad\ntext: x\ncron: nonsense\n")
    refused = pawl.refuse("apply", "-f", str(shop))
    assert f"{bad}:3: " in refused, refused
    bad.unlink()
    planned = pawl.succeed("apply", "-f", str(shop), "--dry-run")
    assert _listed(pawl, tmp_path / "planned") == before, "nothing has changed yet"
    saved = pawl.succeed("apply", "-f", str(shop))
    assert saved.count("secret, shown only now: whsec_") == 2
    assert planned.count(": created") == saved.count(": created") == 6
    again = pawl.succeed("apply", "-f", str(shop))
    assert again.count("unchanged") == len(again.splitlines()) == 8, again

    (shop / "rules" / "ask.yaml").write_text(SHOP["rules/ask.yaml"].replace("ASK", "DENY", 1))
    changed = pawl.succeed("apply", "-f", str(shop))
    assert "+effect: DENY" in changed
    assert pawl.succeed("rules", "list").count("calculate") == 1, "the earlier rule is revoked"

    out = tmp_path / "out"
    pawl.succeed("export", str(out), "--name", "copy")
    assert "stock-token" in (out / "sources" / "stock.yaml").read_text()
    for folder in (out / "agents", out / "schedules", out / "rules"):
        for file in folder.iterdir():
            if not (shop / folder.name / file.name).exists() and file.stem not in {"till", "clerk", "ask-till"}:
                file.unlink()
    assert "belongs to the set 'shop'; add --adopt" in pawl.refuse("apply", "-f", str(out))
    adopted = pawl.succeed("apply", "-f", str(out), "--adopt")
    assert adopted.count(": adopted") == 8, adopted
    assert "belongs to the set 'copy'" in pawl.refuse("apply", "-f", str(shop), "--prune")

    for kind in ("agents", "rules", "schedules", "triggers", "channels", "sources", "settings"):
        shutil.rmtree(out / kind)
    assert "use --prune to delete" in pawl.succeed("apply", "-f", str(out))
    pruned = pawl.succeed("apply", "-f", str(out), "--prune")
    assert pruned.count(": deleted") == 8, pruned
    assert _listed(pawl, tmp_path / "after") == before
