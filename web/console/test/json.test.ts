import { encode, decode } from "@pawl/client";
import { expect, it } from "vitest";

import { pack, parse, unpack } from "../src/json";

it.each(["9007199254740993", "-9007199254740993", "18446744073709551615"])("large integers keep their digits: %s", (digits) => {
  const text = `{"account":${digits},"all":[${digits},1.5,1e300,12]}`;
  expect(JSON.stringify(parse(text))).toBe(text.replace("1e300", "1e+300"));
  expect(atob(encode(decode(btoa(text), parse)))).toBe(text.replace("1e300", "1e+300"));
});

it("small integers become numbers", () => {
  expect(parse('[1, -2.5, 9007199254740991, 1e21, "9007199254740993"]')).toEqual([1, -2.5, 9007199254740991, 1e21, "9007199254740993"]);
});

it("an item edited as JSON keeps its integers", () => {
  const item = { name: "billing", parametersJson: btoa('{"account":9007199254740993}'), tools: [{ limits: { rows: 10 } }] };
  const text = JSON.stringify(unpack(item), null, 2);
  expect(text).toContain('"account": 9007199254740993');
  expect(pack(parse(text))).toEqual(item);
});
