// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Namespace creates a namespace for the test and returns its name. When the test ends,
// the namespace is deleted with its Services and EndpointSlices.
func (s *Server) Namespace(t testing.TB) string {
	t.Helper()
	namespaces := s.client.CoreV1().Namespaces()
	ns, err := namespaces.Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create namespace: %v", err)
	}
	t.Cleanup(func() {
		if !s.APIServer.Running() {
			return // no cleanup is possible, and no other test uses this namespace
		}
		if err := s.removeNamespace(context.WithoutCancel(t.Context()), ns); err != nil {
			t.Errorf("remove namespace %s: %v", ns.Name, err)
		}
	})
	return ns.Name
}

// removeNamespace deletes a namespace and its objects, as the namespace controller does.
func (s *Server) removeNamespace(ctx context.Context, ns *corev1.Namespace) error {
	err := errors.Join(
		s.client.CoreV1().RESTClient().Delete().Namespace(ns.Name).Resource("services").Do(ctx).Error(),
		s.client.DiscoveryV1().RESTClient().Delete().Namespace(ns.Name).Resource("endpointslices").Do(ctx).Error(),
		s.client.CoreV1().Namespaces().Delete(ctx, ns.Name, metav1.DeleteOptions{}),
	)
	if err != nil {
		return err
	}
	_, err = s.client.CoreV1().Namespaces().Finalize(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns.Name}}, metav1.UpdateOptions{})
	return err
}

// User returns the client configuration of a new user with the given permissions in the
// whole cluster. The user's permissions are deleted when the test ends.
func (s *Server) User(t testing.TB, rules ...rbacv1.PolicyRule) *rest.Config {
	t.Helper()
	roles, bindings := s.client.RbacV1().ClusterRoles(), s.client.RbacV1().ClusterRoleBindings()
	role, err := roles.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-user-"},
		Rules:      rules,
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create role: %v", err)
	}
	user := role.Name
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
	}
	if _, err := bindings.Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatalf("bind role of user %s: %v", user, err)
	}
	t.Cleanup(func() {
		if !s.APIServer.Running() {
			return
		}
		ctx := context.WithoutCancel(t.Context())
		err := errors.Join(
			bindings.Delete(ctx, user, metav1.DeleteOptions{}),
			roles.Delete(ctx, user, metav1.DeleteOptions{}),
		)
		if err != nil {
			t.Errorf("remove user %s: %v", user, err)
		}
	})
	config, err := s.clientConfig(user)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.waitAllowed(t.Context(), user, rules); err != nil {
		t.Fatalf("wait for permissions of user %s: %v", user, err)
	}
	return config
}

// waitAllowed waits until the user has the first permission in rules. The API server
// applies changes of roles and bindings with a delay.
func (s *Server) waitAllowed(ctx context.Context, user string, rules []rbacv1.PolicyRule) error {
	if len(rules) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	rule := rules[0]
	attributes := &authorizationv1.ResourceAttributes{
		Group: rule.APIGroups[0], Resource: rule.Resources[0], Verb: rule.Verbs[0],
	}
	if len(rule.ResourceNames) > 0 {
		attributes.Name = rule.ResourceNames[0]
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user, ResourceAttributes: attributes,
	}}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		answer, err := s.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		if answer.Status.Allowed {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("still not allowed to %s %s: %w", attributes.Verb, attributes.Resource, ctx.Err())
		case <-tick.C:
		}
	}
}

// Kubeconfig writes config to a temporary file and returns the file's path.
func Kubeconfig(t testing.TB, config *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := WriteKubeconfig(path, config); err != nil {
		t.Fatalf("write kubeconfig: %v", err)
	}
	return path
}

// WriteKubeconfig writes config to a file that only its owner can read.
func WriteKubeconfig(path string, config *rest.Config) error {
	const name = "test"
	return clientcmd.WriteToFile(clientcmdapi.Config{
		CurrentContext: name,
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		Clusters: map[string]*clientcmdapi.Cluster{name: {
			Server:                   config.Host,
			CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{name: {
			ClientCertificateData: config.CertData,
			ClientKeyData:         config.KeyData,
			Token:                 config.BearerToken,
		}},
	}, path)
}
