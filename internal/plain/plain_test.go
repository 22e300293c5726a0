// SPDX-License-Identifier: Apache-2.0

package plain

import (
	"bytes"
	"encoding/json"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestCheck(t *testing.T) {
	for text, ok := range map[string]bool{
		"": true, "web": true, "Größe 1": true, "世界": true,
		"a\nb": false, "a\tb": false, "\x1b[31m": false, "\x7f": false, "\u009b": false, "\u202e": false, "\u2066": false, "\xff": true,
	} {
		if err := Check("x", text); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
	if CheckMap(map[string]string{"a": "b", "c": "\x1b"}) == nil || CheckMap(nil) != nil {
		t.Error("wrong result for a map")
	}
}

func TestWriterEscapesControlCharacters(t *testing.T) {
	for text, want := range map[string]string{
		"a\tb\nä世\n":               "a\tb\nä世\n",
		"\x1b]0;pwned\x07":         `\u001b]0;pwned\u0007`,
		"a\rb\x00\x7f\u009b\u202e": `a\u000db\u0000\u007f\u009b\u202e`,
		"\xff\U000e0001":           `\ufffd\udb40\udc01`,
	} {
		for cut := range len(text) {
			var out bytes.Buffer
			w := Writer(&out)
			for _, part := range []string{text[:cut], text[cut:]} {
				if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
					t.Errorf("%q: %d, %v", part, n, err)
				}
			}
			if out.String() != want {
				t.Errorf("%q, cut at %d: %q, want %q", text, cut, &out, want)
			}
		}
	}
}

// TestJSONStaysValid checks that a reader of JSON gets the characters that the writer
// escapes.
func TestJSONStaysValid(t *testing.T) {
	const want = "\x1b\x7f\u009b\u202e\U000e0001\U0010ffff"
	var out bytes.Buffer
	if err := json.NewEncoder(Writer(&out)).Encode(want); err != nil {
		t.Fatal(err)
	}
	var got string
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got != want {
		t.Errorf("%s decodes as %q, %v; want %q", &out, got, err, want)
	}
}

func TestLineHasNoNewlines(t *testing.T) {
	for text, want := range map[string]string{"": "", "web ä": "web ä", "a\n\tb\x1b\u202e": `a\u000a\u0009b\u001b\u202e`} {
		if got := Line(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestYAMLKeepsValues(t *testing.T) {
	for _, want := range []string{"", "a\tb\n\\u0041", "\x00\x1b\x7f\u0085\u009b\u202e", "\ufeff\ufffe\uffff", "flag \U0001f3f4\U000e0067\U000e007f"} {
		text, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		text = YAML(text)
		for name, decode := range map[string]func([]byte, any) error{
			"JSON": json.Unmarshal,
			"YAML": func(text []byte, into any) error { return yaml.Unmarshal(text, into) },
		} {
			var got string
			if err := decode(text, &got); err != nil || got != want {
				t.Errorf("%s as %s: %q, want %q, %v", text, name, got, want, err)
			}
		}
	}
}
