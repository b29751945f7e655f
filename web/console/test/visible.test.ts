import { expect, it } from "vitest";

// tests/unit/chassis/test_values.py reads the same file.
import table from "../../../tests/golden/visible.json";
import { visible } from "../src/visible";

it.each(table as [string, string][])("%j is shown as %j", (text, shown) => {
  expect(visible(text)).toBe(shown);
  expect(visible(shown)).toBe(shown);
});
