// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernelnode

import "fmt"

// Difference is an error that describes how the content of the kernel differs from the
// expected content.
type Difference string

func (d Difference) Error() string { return string(d) }

// Differs returns a Difference with a formatted description.
func Differs(format string, args ...any) error { return Difference(fmt.Sprintf(format, args...)) }
