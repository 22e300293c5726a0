// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"encoding/json"
	"fmt"
)

// MarshalJSON returns the endpoint's JSON form with the field Port.
func (t Target) MarshalJSON() ([]byte, error) {
	text, err := json.Marshal(t.Endpoint)
	if err != nil || t.Port == 0 {
		return text, err
	}
	return fmt.Appendf(text[:len(text)-1], `,"Port":%d}`, t.Port), nil
}

// MarshalJSON says whether the endpoint is on the list, and why: {"In": true,
// "Why": "ready and on this node"}.
func (r Reason) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		In  bool
		Why string
	}{r.In(), r.String()})
}

// MarshalText returns String.
func (t Topology) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// MarshalText returns String.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// MarshalText returns String.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// MarshalText returns String.
func (m Masquerade) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// MarshalText returns String.
func (f Fault) MarshalText() ([]byte, error) { return []byte(f.String()), nil }
