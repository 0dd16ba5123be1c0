"""Texts on which the conversion of a tokenizer is compared: spaces, scripts, digits, code, and characters that
normalisation changes."""

from __future__ import annotations

TEXTS = (
    "Hello", " Hello", "  Hello", "Hello ", "Hello  ", "Hello world", "Hello  world", "a   b    c", " ",
    "  ", "\n", "\n\n", "\t", "a\tb", "line one\nline two", "\r\nwindows", " \n mixed \t ", "x", "I",
    "it's", "don't 'quote'", "Ünïcödé", "naïve café", "ﬁne ﬂow", "Ångström", "e\u0301",
    "\uff46\uff55\uff4c\uff4c \uff57\uff49\uff44\uff54\uff48", "\u2460\u2461\u2462", "\u00bd \u00bc",
    "x\u00b2", "日本語のテキスト", "中文字符", "한국어 문장", "Привет, мир", "Ελληνικά", "עברית", "العربية",
    "ह\u093fन\u094dद\u0940", "ไทย", "\U0001f600",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1eb\U0001f1f7 flag",
    "\u00a0no-break", "zero\u200bwidth", "\u3000ideographic", "soft\u00adhyphen", "12345", "3.14159",
    "1,000,000", "x1y22z333", "$5 100%", "def f(x):\n    return x ** 2  # power\n",
    "for (int i = 0; i < n; ++i) {", "#include <stdio.h>", "a_b-c.d/e\\f",
    "http://example.org/a?b=c&d=%20", "user@example.org", "{\"key\": [1, 2, null]}",
    "SELECT * FROM t WHERE a = 'b';", "ALLCAPS", "CamelCase", "snake_case", "UPPER lower Mixed",
    "The quick brown fox jumps over the lazy dog.", "the mill stands still",
    "What goes in must come out.", "She said: \"No!\"", "\u00abguillemets\u00bb", "\u201equotes\u201c",
    "em\u2014dash", "\u2026ellipsis...", "a/b", "(brackets) [square] {curly}", "tilde~ caret^ pipe|",
    "a+b=c", "==", "--", "....", "!!!???", "aaaaaaaaaaaaaaaa", "abababab", "xyzzy",
    "antidisestablishmentarianism", "Donaudampfschifffahrt", "l'été", "ça", "straße", "İstanbul", "ﷺ",
    "\ufeffbom", "\u0000", "\u007f", "tab\t\ttab", "trailing newline\n", " leading and trailing ",
    "Q: 2+2?\nA: 4", "1st 2nd 3rd", "U.S.A.", "e.g. i.e.", "10:30", "2024-01-31", "C++ C# F#",
    "~/.bashrc", "π \u2248 3", "\u2192 \u21d2 \u2200x", "\U0001f642\U0001f643 mixed 文字 text", "ー", "々",
    "\U0001d518\U0001d52b\U0001d526", "\U0001f600\u200d", "A\u030a",
)  # fmt: skip
